"""The model card: what a checkpoint is, what it was made of, and how to serve it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark_train.drafter import DrafterConfig
from dspark_train.formats.destinations import DESTINATIONS, kind_of, what_is_left_out
from dspark_train.formats.writing import TEMPERATURES

ALGORITHM = {"dspark": "DSPARK", "dflash": "DFLASH", "dflash2": "DFLASH"}


@dataclass(frozen=True)
class Measured:
    """Mean committed tokens per round, and with which sampler on what it was found."""

    where: str
    sampler: str
    tau: float
    acceptance: Sequence[float] = ()


@dataclass(frozen=True)
class Story:
    """Where a drafter comes from; what is empty is not known.

    Attributes:
        recipe: settings of the training, by group.
        data: counts and sources of prompts and responses.
        measured: rows of the τ table.
        licence: of the target.
    """

    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    measured: Sequence[Measured] = ()
    licence: str | None = None


def card(name: str, config: DrafterConfig, story: Story) -> str:
    """The README.md of a checkpoint in format `name`."""
    target = (config.target or {}).get("name") or "TARGET"
    head = config.markov_head_type or "none"
    lines = [
        "---",
        "library_name: dspark_train",
        *([f"license: {story.licence}"] if story.licence else []),
        *([f"base_model: {target}"] if ":" not in target else []),
        "tags: [speculative-decoding, drafter]",
        "---",
        f"# A drafter for {target}",
        "",
        "A small model that guesses tokens of its target, which verifies them: the output is the "
        f"target's own, only faster. Format `{name}`.",
        "",
        "| | |",
        "|---|---|",
        f"| layers, hidden size | {config.num_hidden_layers}, {config.hidden_size} |",
        f"| block size, proposals | {config.block_size}, {config.slots.num_proposals} |",
        f"| proposes from the anchor | {'yes' if config.sample_from_anchor else 'no'} |",
        f"| tapped target layers (0-based outputs) | {config.target_layer_ids} |",
        f"| mask token | {config.mask_token_id} |",
        f"| sequential head | {head} |",
        f"| draft vocabulary | {config.draft_vocabulary:,} of {config.vocab_size:,} |",
        "",
        "Serve it with the block size it was trained with: another proposal length collapses "
        "acceptance.",
        "",
        "## Licence",
        "",
        f"The target's is `{story.licence}`." if story.licence else "The target's is not recorded.",
        "The drafter was trained on what the target said and computed; mind its terms.",
        "",
        *_notes(name, config),
        *_measured(story),
        *_table("Recipe", {f"{g}.{k}": v for g, s in story.recipe.items() for k, v in s.items()}),
        *_table("Data", story.data),
        *_commands(name, config, target),
    ]
    return "\n".join(lines) + "\n"


def _notes(name: str, config: DrafterConfig) -> list[str]:
    notes = [f"- {note}" for note in what_is_left_out(name, config)]
    return ["## What this format leaves out", "", *notes, ""] if notes else []


def _measured(story: Story) -> list[str]:
    if not story.measured:
        return []
    rows = [
        f"| {m.where} | {m.sampler} | {m.tau:.3f} | {' '.join(f'{a:.2f}' for a in m.acceptance)} |"
        for m in story.measured
    ]
    return [
        "## Accepted length",
        "",
        "τ is the mean number of committed tokens per round, the target's own one included.",
        "",
        "| on | sampler | τ | acceptance per proposal |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _table(title: str, values: Mapping[str, Any]) -> list[str]:
    if not values:
        return []
    rows = [f"| {key} | {json.dumps(value, default=str)} |" for key, value in values.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *rows, ""]


def _commands(name: str, config: DrafterConfig, target: str) -> list[str]:
    """Commands for the software that reads this format."""
    lines = ["## Use it", "", "```python", "from dspark_train.decoding import SpeculativeDecoder"]
    lines += [
        "",
        f'decoder = SpeculativeDecoder.from_pretrained("THIS_FOLDER", target="{target}")',
        'print(decoder.generate("Once upon a time", max_new_tokens=100).text)',
        "```",
        "",
    ]
    if name == "vllm" or name == "speculators":
        method = "dspark" if kind_of(config) == "dspark" else "dflash"
        told = json.dumps(
            {
                "method": method,
                "model": "THIS_FOLDER",
                "num_speculative_tokens": config.slots.num_proposals,
            }
        )
        lines += ["```bash", f"vllm serve {target} --speculative-config '{told}'", "```", ""]
    if name == "sglang":
        lines += ["```bash", *_sglang(config, target), "```", ""]
    if name == "transformers":
        lines += [
            "```python",
            "from dspark_train.formats.assistant import DFlashAssistant",
            "",
            'assistant = DFlashAssistant.load("THIS_FOLDER")',
            "model.generate(**inputs, assistant_model=assistant, "
            'speculation_type="dflash", do_sample=False)',
            "```",
            "",
        ]
    return lines


def _sglang(config: DrafterConfig, target: str) -> list[str]:
    kind = kind_of(config)
    lines = [
        f"python -m sglang.launch_server --model-path {target}",
        f"--speculative-algorithm {ALGORITHM[kind]}",
        "--speculative-draft-model-path THIS_FOLDER",
    ]
    if kind == "dspark":
        lines.append(f"--speculative-dspark-block-size {config.block_size}")
        if DESTINATIONS["sglang"].temperatures_of(config):
            lines.append(f"--speculative-dspark-confidence-sts-path THIS_FOLDER/{TEMPERATURES}")
    else:
        lines.append(f"--speculative-num-draft-tokens {config.block_size}")
    return [" \\\n  ".join(lines)]
