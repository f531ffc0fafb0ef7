"""The block drafter as a proposer of trees: one parallel pass, then many walks of the head."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch

from dspark_train.decoding.proposers.block import BlockProposer
from dspark_train.decoding.proposers.growing import Growing
from dspark_train.decoding.proposers.tree import Tree, TreeShape
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.drafter import Drafter
from dspark_train.target import TargetHead


class TreeProposer(BlockProposer):
    """Proposes trees where `BlockProposer` proposes one chain, from the same drafter pass.

    The slots of a block do not know which tokens were drafted before them, so the pass is shared by
    all branches; with a sequential head each branch has its own bias.

    Args:
        shape: how large trees are; nodes that no tree of this drafter can have get no room.
        drafter, head, vocabulary, use_heads, sampler: as those of `BlockProposer`.
    """

    def __init__(
        self,
        shape: TreeShape,
        drafter: Drafter,
        head: TargetHead,
        vocabulary: int | None = None,
        use_heads: bool = True,
        sampler: SamplingSettings | None = None,
    ) -> None:
        super().__init__(drafter, head, vocabulary, use_heads, sampler)
        slots, b = drafter.slots.num_proposals, shape.branches
        self.shape = replace(shape, nodes=min(shape.nodes, b + (slots - 1) * b * b))
        self.temperatures = drafter.config.confidence_temperatures or [1.0] * slots

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Tree]:
        hidden = self._block(requests)[:, : max(limits)]
        logits = self._unary(hidden)
        growing = Growing(
            requests,
            limits,
            self.shape,
            self.sampler,
            self.draft_ids,
            self.vocabulary,
            hidden.device,
        )
        began = perf_counter()
        self._walk_branches(growing, logits, hidden)
        trees = growing.trees()
        self.walked += perf_counter() - began
        return trees

    def _walk_branches(self, growing: Growing, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Level by level; the bias of each node's children sees the tokens of its own path."""
        state, embedding = None, None
        if self.markov is not None:
            state, logits = self.markov.start(hidden[:, :1]), self.markov.candidates(logits)
        for slot in range(hidden.shape[1]):
            here = hidden[:, slot, None].expand(-1, growing.tokens.shape[1], -1)
            biased = logits[:, slot, None].expand(-1, here.shape[1], -1)
            if self.markov is not None:
                bias, embedding, state = self.markov.step(state, growing.tokens, here)
                biased = biased + bias[..., : biased.shape[-1]]
            confidence = None
            if self.confidence is not None:
                said = self.confidence.logits(here, embedding).float() + self.shifts[slot]
                confidence = (said / self.temperatures[slot]).sigmoid()
            parents = growing.grow(biased, confidence)
            if not growing.alive:
                break
            if state is not None:
                state = state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
