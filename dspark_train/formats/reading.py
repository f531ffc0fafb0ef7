"""Any published drafter in: a folder or hub id of any layout of the table becomes our drafter."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.drafter import load_config as load_own_config
from dspark_train.drafter import load_drafter as load_own
from dspark_train.drafter.loading import LOADING_ERRORS
from dspark_train.formats.fields import drafter_config, layout_of
from dspark_train.formats.files import CONFIG, Tensors, folder_of, read_json
from dspark_train.formats.table import RENAMED, SHARED, Layout
from dspark_train.target import TargetHead

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another project: its layout, our configuration of it, and its tensors."""

    source: str
    layout: Layout
    config: DrafterConfig
    tensors: Tensors


def load_config(source: str | Path) -> DrafterConfig:
    """The configuration of a drafter checkpoint of any known layout.

    Raises:
        ValueError: missing, damaged or unknown; the message says what was expected.
    """
    found = inspect(source)
    return found.config if isinstance(found, Foreign) else found


def load_drafter(
    source: str | Path, dtype: torch.dtype | None = None, head: TargetHead | None = None
) -> Drafter:
    """A drafter with every weight that its checkpoint has, none of them made up.

    Args:
        source: folder or hub id, in any layout of `formats/table.py`.
        dtype: of the weights; None takes that of the checkpoint.
        head: the target's; needed where the checkpoint ships an embedding or an LM head, which
            must be the target's own.

    Raises:
        ValueError: missing, damaged or foreign files; a tensor, a field or a convention that is
            not known; weights that do not fit the configuration or the target.
    """
    drafter = _load(source, dtype, head)
    for name, tensor in drafter.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(
                f"checkpoint {source} is damaged: {name} holds NaN or infinity; export it again"
            )
    return drafter


def _load(source: str | Path, dtype: torch.dtype | None, head: TargetHead | None) -> Drafter:
    found = inspect(source)
    if not isinstance(found, Foreign):
        return load_own(folder_of(source), dtype)
    weights = _own_names(found)
    for name in SHARED:
        if name in weights:
            _require_the_targets(found, name, weights.pop(name), head)
    if "t2d" in weights:
        _require_inverse(found, weights.pop("t2d"), weights.get("d2t"))
    drafter = Drafter(found.config)
    expected = drafter.state_dict()
    _require_same_names(found, {name: t.shape for name, t in expected.items()}, weights)
    _require_numbers(found, expected, weights)
    stored = {t.dtype for t in weights.values() if t.is_floating_point()}
    drafter.to(dtype or (stored.pop() if len(stored) == 1 else torch.float32))
    drafter.load_state_dict(weights)
    return drafter.eval()


def inspect(source: str | Path) -> Foreign | DrafterConfig:
    """What a checkpoint is: one of another project, or the configuration of one of ours.

    Raises:
        ValueError: as `load_config`.
    """
    folder = folder_of(source)
    content = read_json(folder / CONFIG)
    if content.get("model_type") == DrafterConfig.model_type:
        return load_own_config(folder)
    layout = layout_of(str(source), content)
    tensors = Tensors(folder)
    try:
        config = drafter_config(str(source), layout, content, tensors.shapes)
    except LOADING_ERRORS as error:
        if isinstance(error, ValueError) and str(source) in str(error):
            raise
        raise ValueError(f"checkpoint {source} ({layout.name}): {error}") from error
    return Foreign(str(source), layout, config, tensors)


def _own_names(found: Foreign) -> dict[str, torch.Tensor]:
    return {RENAMED.get(name, name): found.tensors[name] for name in found.tensors}


def _require_same_names(
    found: Foreign, expected: dict[str, torch.Size], weights: dict[str, torch.Tensor]
) -> None:
    place = f"checkpoint {found.source} ({found.layout.name})"
    theirs = {ours: name for name, ours in RENAMED.items()}
    for name in sorted(set(weights) - set(expected)):
        raise ValueError(
            f"{place} has the tensor {theirs.get(name, name)}, which its config.json has no place "
            f"for: expected {len(expected)} tensors such as {min(expected)}"
        )
    for name in sorted(set(expected) - set(weights)):
        raise ValueError(
            f"{place} lacks the tensor {theirs.get(name, name)} {tuple(expected[name])}, which its "
            "config.json asks for"
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"{place}: {theirs.get(name, name)} has shape {tuple(weights[name].shape)}, "
                f"expected {tuple(shape)} by its config.json"
            )


def _require_numbers(
    found: Foreign, expected: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> None:
    """Weights in eight bits mean nothing without scales, and ids are no fractions."""
    for name, meant in expected.items():
        dtype, allowed = weights[name].dtype, FLOATS if meant.is_floating_point() else INTEGERS
        if dtype not in allowed:
            theirs = {ours: name for name, ours in RENAMED.items()}
            raise ValueError(
                f"checkpoint {found.source} ({found.layout.name}): {theirs.get(name, name)} is "
                f"{dtype}, expected one of {[str(one) for one in allowed]}; quantised weights are "
                "not read, export it again in bfloat16"
            )


def _require_the_targets(
    found: Foreign, name: str, shipped: torch.Tensor, head: TargetHead | None
) -> None:
    """A drafter shares the target's embedding and LM head: what is shipped must be equal."""
    place = f"checkpoint {found.source} ({found.layout.name}) ships {name}"
    if head is None:
        raise ValueError(
            f"{place}: give the target (target=, convert.target=), to see that it is the target's"
        )
    own = head.embedding.weight if name == SHARED[0] else head.projection.weight
    if name == SHARED[1] and found.config.draft_vocab_size:
        d2t = found.tensors["d2t"]
        own = own[(d2t + torch.arange(len(d2t))).to(own.device)]
    if own.shape != shipped.shape:
        raise ValueError(
            f"{place} of shape {tuple(shipped.shape)}, but the target's is {tuple(own.shape)}: "
            "expected the target that the drafter was trained for"
        )
    coarse = min((own.dtype, shipped.dtype), key=lambda dtype: dtype.itemsize)
    different = (own.cpu().to(coarse) != shipped.to(coarse)).any(-1).sum().item()
    if different:
        raise ValueError(
            f"{place}, which differs from the target's in {different} of {len(own)} rows: a "
            "drafter with an embedding or LM head of its own is not supported; expected the target "
            "that it was trained for"
        )


def _require_inverse(found: Foreign, t2d: torch.Tensor, d2t: torch.Tensor | None) -> None:
    place = f"checkpoint {found.source} ({found.layout.name})"
    if d2t is None:
        raise ValueError(f"{place} has t2d without d2t: expected both, or none")
    marked = t2d.bool().nonzero().squeeze(-1)
    if not torch.equal(marked, d2t.long() + torch.arange(len(d2t))):
        raise ValueError(
            f"{place}: t2d and d2t contradict each other; expected target id = draft id + "
            "d2t[draft id] to give exactly the ids that t2d marks"
        )
