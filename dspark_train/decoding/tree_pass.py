"""One target pass over trees, and their paths put where a chain would lie."""

from collections.abc import Sequence
from typing import Any

import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.proposers.tree import Tree
from dspark_train.target import Target, TargetOutput


def read_trees(
    model: Target,
    cache: KVCache,
    read: Sequence[Sequence[int]],
    trees: Sequence[Tree],
    taps: Sequence[int] = (),
) -> TargetOutput:
    """Let `model` read one tree per active row of `cache`, all nodes in one pass.

    A node stands at the position of its depth behind the anchor, and sees the row's context, its
    ancestors and itself (SpecInfer, section 4.2). Outputs are `[n, 1 + room, …]`, by node.

    Args:
        read: anchor and drafts of each row.
        trees: how they hang together.
    """
    width = 1 + max(tree.room for tree in trees)
    ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in read])
    seen = torch.tensor([ancestors(tree.parents, width) for tree in trees])
    positions = torch.tensor(cache.active_lengths)[:, None] + seen.sum(-1) - 1
    return model.forward(
        ids.to(model.device),
        position_ids=positions.to(model.device),
        attention_mask=tree_masks(cache, model, seen),
        cache=cache,
        taps=taps,
    )


def ancestors(parents: Sequence[int], width: int) -> list[list[bool]]:
    """Which of `width` nodes each of them sees: its ancestors and itself; padding itself alone."""
    seen = [[i == j for j in range(width)] for i in range(width)]
    for node, parent in enumerate(parents, start=1):
        seen[node] = [a or b for a, b in zip(seen[parent], seen[node], strict=True)]
    return seen


def tree_masks(cache: KVCache, target: Target, seen: torch.Tensor) -> torch.Tensor | dict[str, Any]:
    """What `Target.forward` takes as attention mask for the next pass; see `KVCache.masks`.

    Args:
        seen: `[n, q, q]` bool, which node sees which.
    """
    window = target.sliding_window
    if target.masks_by_layer_type:
        kinds = {"full_attention": None, "sliding_attention": window}
        return {kind: _mask(cache, target, seen, limit) for kind, limit in kinds.items()}
    return _mask(cache, target, seen, window)


def _mask(cache: KVCache, target: Target, seen: torch.Tensor, window: int | None) -> torch.Tensor:
    """Additive `[n, 1, q, end]`."""
    lengths, q = cache.active_lengths, seen.shape[1]
    visible = torch.zeros(len(lengths), q, max(lengths) + q, dtype=torch.bool)
    depths = seen.sum(-1) - 1
    for row, length in enumerate(lengths):
        visible[row, :, :length] = True
        visible[row, :, length : length + q] = seen[row]
        if window is not None:
            held = torch.cat((torch.arange(length), length + depths[row]))
            last = length + depths[row]
            visible[row, :, : length + q] &= held > last[:, None] - window
    lowest = torch.finfo(target.dtype).min
    mask = torch.zeros(visible.shape, dtype=target.dtype).masked_fill_(~visible, lowest)
    return mask[:, None].to(target.device)


def straighten(
    cache: KVCache, output: TargetOutput, paths: Sequence[Sequence[int]]
) -> TargetOutput:
    """Put the nodes of a path behind their anchor, as if nothing else had been read.

    Args:
        cache: its active rows have just read the trees.
        output: of that pass.
        paths: per row the nodes that stand, from depth 1 on.

    Returns:
        `output` with features in that order; what lies behind the paths means nothing.
    """
    width = output.last_hidden.shape[1]
    places = [[0, *path] for path in paths]
    cache.rearrange(width, places)
    features = output.features
    if features is not None:
        order = [[*chosen, *range(len(chosen), width)] for chosen in places]
        rows = torch.arange(len(places), device=features.device)[:, None]
        features = features[rows, torch.tensor(order, device=features.device)]
    return TargetOutput(output.last_hidden, features)


@torch.inference_mode()
def refuse_without_trees(target: Target) -> None:
    """Let the target read a small tree, and compare it with its branches read one by one.

    Raises:
        ValueError: its attention does not follow the mask and the positions that it is given, or
            some layers have no attention.
    """
    if target.recurrent:
        raise ValueError(
            f"target {target.name}: {type(target.model).__name__} keeps a recurrent state, which "
            "follows one branch of a tree only; decode without trees (tree_nodes=0)"
        )
    context, tree = [0, 1], Tree([0, 1, 1, 0], parents=[0, 0, 2, 3], room=5)
    cache = KVCache(target.num_layers)
    ids = torch.tensor([context], device=target.device)
    target.forward(ids, attention_mask=cache.masks(len(context), target), cache=cache)
    nodes = read_trees(target, cache, [[0, *tree.tokens]], [tree]).last_hidden[0]
    branch = torch.tensor([[*context, 0, 1, 1, 0]], device=target.device)
    alone = target.forward(branch).last_hidden[0, len(context) :]
    tolerance = 1e-4 if target.dtype == torch.float32 else 5e-2
    if (nodes[[0, 2, 3, 4]] - alone).abs().max() > tolerance * alone.abs().max():
        raise ValueError(
            f"target {target.name}: {type(target.model).__name__} does not follow the attention "
            "mask and the positions of a tree; decode without trees (tree_nodes=0)"
        )
