"""Every server out: a drafter written in the layout that a destination reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.drafter.config import FULL
from dspark_train.formats.destinations import (
    DESTINATIONS,
    NATIVE,
    Destination,
    refuse_uncarried,
)
from dspark_train.formats.fields import OPTIONAL_SIZES, SIZES
from dspark_train.formats.files import CONFIG, SINGLE
from dspark_train.formats.gemma4 import text_config
from dspark_train.formats.table import (
    AUX,
    GEMMA4,
    INNER,
    RENAMED,
    SHARED,
    SPECULATORS,
    Layout,
    without_inherited,
)
from dspark_train.target import TargetHead

TEMPERATURES = "confidence_temperatures.json"
# of the release whose files are written
SPECULATORS_VERSION = "0.9.0"


def write(
    folder: Path,
    name: str,
    drafter: Drafter,
    head: TargetHead | None = None,
    *,
    architectures: list[str] | None = None,
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint that the destination `name` reads.

    Args:
        folder: is made.
        name: one of `formats.FORMATS`.
        drafter: in the dtype that is written.
        head: the target's, for what must ship rows of it.
        architectures: of the target, for speculators.
        calibration: `dataset`, `num_samples`, `ece_before` (of the head as trained),
            `ece_after` (of what the destination does with the temperatures).

    Raises:
        ValueError: the destination cannot carry this drafter; the message says what to do.
    """
    if name == NATIVE:
        drafter.save_pretrained(folder)
        return
    destination = DESTINATIONS[name]
    layout = refuse_uncarried(name, drafter.config)
    tensors = _tensors(destination, layout, drafter, head)
    content = _config(destination, layout, drafter, architectures)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    _write_json(folder / CONFIG, content)
    if temperatures := destination.temperatures_of(drafter.config):
        _write_json(folder / TEMPERATURES, {"temperatures": temperatures, **(calibration or {})})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _tensors(
    destination: Destination, layout: Layout, drafter: Drafter, head: TargetHead | None
) -> dict[str, torch.Tensor]:
    config = drafter.config
    theirs = {ours: name for name, ours in RENAMED.items()}
    selects = config.markov_head_type == "selector"
    drops = not selects and not config.markov_head_type and not config.sample_from_anchor
    result = {}
    for name, tensor in drafter.state_dict().items():
        if name.startswith("confidence_head") and (selects or drops):
            continue
        result[theirs[name] if selects and name in theirs else name] = tensor.contiguous().cpu()
    reduced, ships = config.draft_vocab_size, destination.ships(layout)
    if reduced or ships:
        if head is None:
            raise ValueError(
                f"export format {destination.name} ships rows of the target's LM head: give the "
                "target (convert.target=)"
            )
        dtype = drafter.dtype
        rows = head.projection.weight
        if reduced:
            rows = rows[drafter.draft_ids.to(rows.device)]
            if destination.layouts is SPECULATORS:
                marks = torch.zeros(config.vocab_size, dtype=torch.bool)
                marks[drafter.draft_ids.cpu()] = True
                result["t2d"] = marks
        result[SHARED[1]] = rows.detach().to("cpu", dtype, copy=True)
        if ships:
            result[SHARED[0]] = head.embedding.weight.detach().to("cpu", dtype, copy=True)
    return result


def _config(
    destination: Destination,
    layout: Layout,
    drafter: Drafter,
    architectures: list[str] | None,
) -> dict[str, Any]:
    config = drafter.config
    sizes, draft = _sizes(layout, config), _draft(layout, config)
    dtype = str(drafter.dtype).removeprefix("torch.")
    if layout.speculators:
        return {
            "architectures": [layout.architecture],
            "speculators_model_type": layout.speculators,
            "speculators_version": SPECULATORS_VERSION,
            INNER: sizes,
            "dtype": dtype,
            "tie_word_embeddings": False,
            "draft_vocab_size": config.draft_vocabulary,
            "sliding_window_non_causal": config.causal_blocks == "none" and any(config.windows),
            "target_hidden_size": None,
            "speculators_config": _speculators_config(layout, config, architectures),
            **draft,
        }
    if config.num_target_layers is None:
        raise ValueError(
            f"export format {destination.name} says how many layers the target has, which "
            "nothing tells: give the target (convert.target=)"
        )
    top = {
        **sizes,
        "architectures": [layout.architecture],
        "dtype": dtype,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
    }
    if config.draft_vocab_size:
        top["draft_vocab_size"] = config.draft_vocab_size
    if layout.draft_in:
        nested = {"block_size": config.block_size, **draft}
        top[layout.draft_in] = nested
        # transformers' generate reads these at the top
        if destination.name == "transformers":
            top |= {key: nested[key] for key in (layout.taps, "mask_token_id")}
        return top
    return {**top, **draft}


def _sizes(layout: Layout, config: DrafterConfig) -> dict[str, Any]:
    """The backbone as a model of its family, without what is inherited from the target."""
    layers = config.num_hidden_layers
    if layout.family == GEMMA4:
        return text_config(config)
    return {
        "model_type": "qwen3",
        "rope_parameters": without_inherited(config.rope_parameters),
        **{key: getattr(config, key) for key in (*SIZES, *OPTIONAL_SIZES)},
        "layer_types": config.layer_types or [FULL] * layers,
        **_causality(layout, config),
        "attention_dropout": 0.0,
        "max_window_layers": layers,
        "sliding_window": config.sliding_window,
        "use_sliding_window": any(config.windows),
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _causality(layout: Layout, config: DrafterConfig) -> dict[str, bool]:
    """Said always, but where sliding layers alone are causal, which is what silence means."""
    if config.causal_blocks == "sliding" and not layout.speculators:
        return {}
    # speculators say elsewhere whether sliding layers are
    return {"is_causal": config.causal_blocks == "all"}


def _draft(layout: Layout, config: DrafterConfig) -> dict[str, Any]:
    """Fields of the draft in the words and with the offsets of a layout."""
    fields: dict[str, Any] = {
        layout.taps: [tap + layout.tap_offset for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
    }
    if layout.speculators or layout.kind == "dspark":
        fields["block_size"] = config.block_size
        fields["sample_from_anchor"] = config.sample_from_anchor
    if layout.kind == "dspark":
        fields |= {
            "markov_rank": config.markov_rank if config.markov_head_type else 0,
            "markov_head_type": config.markov_head_type or "vanilla",
            "enable_confidence_head": config.enable_confidence_head,
            "confidence_head_with_markov": bool(
                config.confidence_head_with_markov and config.markov_head_type
            ),
        }
        if layout.taps != AUX:
            fields["num_anchors"] = 512  # of its trainer; nothing reads it when serving
    if layout.kind == "dflash2":
        fields |= {
            "conv_kernel_size": config.conv_kernel_size,
            "conv_group_size": config.conv_group_size,
            "selector_rank": config.markov_rank,
            "selector_top_k": config.selector_top_k,
        }
        said = (config.target or {}).get("head") or {}
        plain = (None, 1.0)
        fields |= {key: value for key, value in said.items() if value not in plain}
    return fields


def _speculators_config(
    layout: Layout, config: DrafterConfig, architectures: list[str] | None
) -> dict[str, Any]:
    name = (config.target or {}).get("name")
    # weights inside a package are a name of ours, which it could not load
    loadable = name if name and ":" not in name else None
    return {
        "algorithm": layout.speculators,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": config.slots.num_proposals,
                "accept_tolerance": 0.0,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"name_or_path": loadable, "architectures": architectures or []},
    }
