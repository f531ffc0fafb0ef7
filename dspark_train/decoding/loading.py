"""From a checkpoint and a name to a target and a proposer that fit each other."""

import math
from pathlib import Path
from typing import Literal, get_args

from dspark_train.decoding.proposers import (
    BlockProposer,
    LookupProposer,
    PlainProposer,
    Proposer,
    TreeProposer,
    TreeShape,
)
from dspark_train.decoding.recording import Recorder
from dspark_train.decoding.sampling import usable_vocabulary
from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.formats import load_drafter
from dspark_train.target import Target
from dspark_train.target.cpu import can_pack, pack_linears
from dspark_train.target.layers import validate_taps

ProposerName = Literal["drafter", "drafter-no-heads", "lookup", "plain"]


def load_target(
    config: DrafterConfig | None, target: Target | str | None, dtype: str, device: str
) -> Target:
    """The target that was given, named, or recorded in the drafter's config.

    Raises:
        ValueError: nothing names a target, or the drafter was made for another one.
    """
    if target is None:
        recorded = (config.target if config is not None else None) or {}
        target = recorded.get("name")
        if target is None:
            raise ValueError(
                "the checkpoint does not name its target: pass target=, a loaded Target or a name "
                "that Target.load takes"
            )
    if isinstance(target, str):
        target = Target.load(target, dtype=dtype, device=device)
    if config is not None:
        check_target(config, target)
    return target


def load_proposer(
    proposer: ProposerName,
    checkpoint: str | Path | None,
    target: Target,
    tree: TreeShape | None = None,
) -> Proposer:
    """The proposer of that name, its drafter in the dtype and on the device of `target`."""
    if proposer == "plain":
        return PlainProposer()
    if proposer == "lookup":
        return LookupProposer()
    drafter = load_drafter(checkpoint, target.dtype, target.head).to(target.device)
    if can_pack(target.dtype, target.device):
        pack_linears(drafter)  # it is this decoder's own and never trained
    return block_proposer(drafter, target, use_heads=proposer == "drafter", tree=tree)


def block_proposer(
    drafter: Drafter, target: Target, *, use_heads: bool = True, tree: TreeShape | None = None
) -> BlockProposer:
    """The proposer of a drafter, over the vocabulary that the target's tokenizer uses.

    It drafts chains, or trees of the shape `tree`.
    """
    check_target(drafter.config, target)
    check_tree(tree)
    vocabulary = usable_vocabulary(target.tokenizer, target.vocab_size)
    if tree is not None:
        return TreeProposer(tree, drafter, target.head, vocabulary, use_heads)
    recorder = Recorder.of(target, drafter.layers)
    return BlockProposer(drafter, target.head, vocabulary, use_heads, recorder=recorder)


def check_proposer(
    proposer: str, checkpoint: str | Path | None, tree: TreeShape | None = None
) -> None:
    """Refuse names that are not proposers, a drafter without a checkpoint, trees without a drafter.

    Raises:
        ValueError: as said.
    """
    if proposer not in get_args(ProposerName):
        raise ValueError(f"proposer={proposer!r}, expected one of {get_args(ProposerName)}")
    if proposer.startswith("drafter") and checkpoint is None:
        raise ValueError(
            f"proposer={proposer!r} needs a checkpoint; without one use 'lookup' or 'plain'"
        )
    if tree is not None and not proposer.startswith("drafter"):
        raise ValueError(f"proposer={proposer!r} drafts no trees: use 'drafter', or tree=None")
    check_tree(tree)


def check_tree(tree: TreeShape | None) -> None:
    """Refuse what is not the shape of a tree.

    Raises:
        ValueError: as said.
    """
    if tree is not None and not isinstance(tree, TreeShape):
        raise ValueError(f"tree={tree!r}, expected a TreeShape(nodes=…, branches=…), or None")


def _near(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=1e-2)


def check_target(config: DrafterConfig, target: Target) -> None:
    """Refuse a target of other sizes than the drafter was made for.

    Raises:
        ValueError: naming both sides of every contradiction.
    """
    sides = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "vocabulary rows": (config.vocab_size, target.vocab_size),
        "number of target layers": (config.num_target_layers, target.num_layers),
    }
    if config.num_target_layers is None:  # some formats do not say
        del sides["number of target layers"]
        validate_taps(config.target_layer_ids, target.num_layers)
    recorded = (config.target or {}).get("head") or {}
    its_head = target.head.facts
    # the scale of an embedding is rounded to the dtype of the weights
    near = {what for what, value in recorded.items() if _near(value, its_head[what])}
    sides |= {what: (recorded[what], its_head[what]) for what in recorded if what not in near}
    wrong = [f"{what} {ours} != {its}" for what, (ours, its) in sides.items() if ours != its]
    if wrong:
        trained_for = (config.target or {}).get("name", "an unnamed target")
        raise ValueError(
            f"the drafter was made for {trained_for} and does not fit target {target.name}: "
            f"{', '.join(wrong)} (drafter != target); use the target that it was made for"
        )
