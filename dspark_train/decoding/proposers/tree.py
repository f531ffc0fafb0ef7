"""A tree of drafts: several guesses for a position, each with what follows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dspark_train.decoding.proposers.base import Proposal

# the mask of a pass grows with the square of its nodes
MOST_NODES = 1024


@dataclass(frozen=True)
class TreeShape:
    """How large the tree of a round is. It fixes the shapes of all passes.

    Attributes:
        nodes: N, drafts that enter the target pass at most.
        branches: children of a node at most, and nodes of one depth that get any.

    Raises:
        ValueError: a tree without drafts, or one that no pass should hold.
    """

    nodes: int = 16
    branches: int = 4

    def __post_init__(self) -> None:
        sizes = (self.nodes, self.branches)
        if not all(isinstance(size, int) and 1 <= size <= MOST_NODES for size in sizes):
            raise ValueError(
                f"a tree of nodes={self.nodes} with branches={self.branches}: expected whole "
                f"numbers from 1 to {MOST_NODES}"
            )


@dataclass(frozen=True)
class Tree(Proposal):
    """Drafts that share their beginnings.

    Node 0 is the anchor and node i the i-th of `tokens`. A node comes behind its parent, and behind
    the siblings that are judged before it.

    Attributes:
        parents: N nodes, of which each draft is a child.
        draft_rows: by node, float32 `[V]`: its children are draws from it without replacement, in
            their order. Nodes that are not in it have children of which the drafter was certain.
        room: nodes that a pass has room for, N or more.
    """

    parents: list[int] = field(default_factory=list)
    draft_rows: Mapping[int, torch.Tensor] = field(default_factory=dict)
    room: int = 0

    def cut(self, length: int) -> "Tree":
        if length < len(self.tokens):
            raise ValueError(
                f"a tree of {len(self.tokens)} drafts cannot be cut to {length}: trees are "
                "verified whole, use a fixed policy"
            )
        return self

    @property
    def children(self) -> list[list[int]]:
        """Per node, anchor included, its children in the order in which they are judged."""
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents, start=1):
            found[parent].append(node)
        return found
