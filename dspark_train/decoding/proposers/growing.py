"""Grows trees level by level, and remembers what their nodes were drawn from.

As in EAGLE-2 (Li et al. 2024): every node has a *reach*, the product along its path of the chances
that its drafts stand. The best nodes of a level get children, and the best N of all levels are the
tree. Drafts are

* certain, where the drafter is greedy: the most likely tokens. The chance of each is its
  probability.
* drawn without replacement, where it samples. Then the chance must not know the token, or the tree
  would anticipate: of the j-th child it is `c (1 − c)^(j−1)`, c the confidence before the first.

No later sibling and no descendant reaches further than a node, so nothing that depends on a drawn
token can push that token out of the tree, nor save it.
"""

from collections.abc import Sequence
from functools import partial

import torch

from dspark_train.decoding.proposers.drawing import allowed_if_any, drafted_with, over_target
from dspark_train.decoding.proposers.tree import Tree, TreeShape
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings, draw_rows, warp_rows


class Growing:
    """The trees of one round for n requests.

    Args:
        requests: n of them.
        limits: depth of each tree at most.
        shape: how large trees are.
        sampler, draft_ids, vocabulary: as those of `Drawing`.
        device: where the logits will be.

    Attributes:
        tokens: `[n, w]` ids of the nodes that get children next, at first the anchors.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],
        shape: TreeShape,
        sampler: SamplingSettings | None,
        draft_ids: torch.Tensor | None,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.requests, self.shape = requests, shape
        self.draft_ids, self.vocabulary = draft_ids, vocabulary
        settings = [sampler or drafted_with(request.settings) for request in requests]
        self.certain = torch.tensor([one.greedy for one in settings], device=device)
        self.all_certain = all(one.greedy for one in settings)
        # candidates of a greedy drafter are ranked by its own probabilities
        self.settings = [SamplingSettings(1.0) if one.greedy else one for one in settings]
        self.processed = any(request.processors for request in requests)
        self.tokens = torch.tensor([r.tokens[-1:] for r in requests], device=device)
        self._limits = torch.tensor(limits, device=device)
        # of the nodes that get children next: reach, number among all candidates, tokens so far
        self._reach = torch.ones(self.tokens.shape, device=device)
        self._numbers = torch.zeros_like(self.tokens)
        self._paths = self.tokens[:, :, None][:, :, :0]
        # by level, of all candidates: ids, parents, reach `[n, w·b]`
        self._candidates: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        # by level, of the nodes that got children: numbers `[n, w]`, probabilities `[n, w, V]`
        self._grown: list[tuple[torch.Tensor, torch.Tensor]] = []

    def grow(self, logits: torch.Tensor, confidence: torch.Tensor | None) -> torch.Tensor:
        """Give children to the nodes of `tokens`; the best of them are the next `tokens`.

        Args:
            logits: `[n, w, Vd]` of the drafter behind each node.
            confidence: `[n, w]` probabilities that a draft behind the node stands, if known.

        Returns:
            `[n, w']` which of the w nodes is the parent of each of the next ones.
        """
        depth, (n, w, _) = len(self._grown), logits.shape
        if self.processed:
            logits = self._process(logits)
        rows = [one for one in self.settings for _ in range(w)]
        probs = warp_rows(logits.flatten(0, 1), rows).view(n, w, -1)
        best = probs.topk(min(self.shape.branches, probs.shape[-1]))
        chances, tokens, b = best.values, best.indices, best.values.shape[-1]
        if not self.all_certain:
            drawn = _chances(probs, confidence, b)
            chances = torch.where(self.certain[:, None, None], chances, drawn)
        inside = (depth < self._limits)[:, None, None]
        reach = self._best_so_far((self._reach[..., None] * chances * inside).flatten(1))
        if not self.all_certain:
            tokens = self._draw(probs, tokens, reach.view_as(tokens), depth)
        tokens = tokens.flatten(1)
        if self.draft_ids is not None and not self.processed:
            tokens = self.draft_ids[tokens]
        self._grown.append((self._numbers, probs))
        first = 1 + sum(each[0].shape[1] for each in self._candidates)
        parents = self._numbers.repeat_interleave(b, dim=1)
        self._candidates.append((tokens, parents, reach))
        order = reach.sort(dim=1, descending=True, stable=True).indices[:, : self.shape.branches]
        self.tokens, self._reach = tokens.gather(1, order), reach.gather(1, order)
        self._numbers, chosen = first + order, order // b
        paths = self._paths.gather(1, chosen[..., None].expand(-1, -1, depth))
        self._paths = torch.cat((paths, self.tokens[..., None]), dim=-1)
        return chosen

    @property
    def alive(self) -> bool:
        """Whether any of the nodes that get children next is in a tree."""
        return bool((self._reach > 0).any())

    def trees(self) -> list[Tree]:
        """The best nodes of all levels."""
        tokens, parents, reach = map(partial(torch.cat, dim=1), zip(*self._candidates, strict=True))
        order = reach.sort(dim=1, descending=True, stable=True).indices[:, : self.shape.nodes]
        kept = order.sort(dim=1).values
        alive = reach.gather(1, kept) > 0
        return [
            self._tree(i, kept[i][yes].tolist(), tokens[i].tolist(), parents[i].tolist())
            for i, yes in enumerate(alive)
        ]

    def _tree(self, i: int, kept: list[int], tokens: list[int], parents: list[int]) -> Tree:
        node = {0: 0} | {index + 1: count for count, index in enumerate(kept, start=1)}
        draft_rows, inner = {}, {parents[index] for index in kept}
        for numbers, probs in [] if self.certain[i] else self._grown:
            for place, number in enumerate(numbers[i].tolist()):
                if number in inner:
                    row = probs[i, place]
                    if not self.processed:
                        row = over_target(row, self.draft_ids, self.vocabulary, 0.0)
                    draft_rows[node[number]] = row
        return Tree(
            [tokens[index] for index in kept],
            parents=[node[parents[index]] for index in kept],
            draft_rows=draft_rows,
            room=self.shape.nodes,
        )

    def _best_so_far(self, reach: torch.Tensor) -> torch.Tensor:
        """`reach` `[n, w·b]` of a new level, 0 for what is not among the best N up to here."""
        together = torch.cat([*(each[2] for each in self._candidates), reach], dim=1)
        order = together.sort(dim=1, descending=True, stable=True).indices[:, : self.shape.nodes]
        kept = torch.zeros_like(together).scatter_(1, order, 1.0)
        return reach * kept[:, -reach.shape[1] :]

    def _draw(
        self, probs: torch.Tensor, tokens: torch.Tensor, reach: torch.Tensor, depth: int
    ) -> torch.Tensor:
        """`tokens` `[n, w, b]` with draws in place of what is not certain but in reach."""
        n, w, b = tokens.shape
        rest, tokens = probs.flatten(0, 1).clone(), tokens.flatten(0, 1)
        wanted = ((reach > 0) & ~self.certain[:, None, None]).flatten(0, 1)
        for place in range(b):
            rows = wanted[:, place].nonzero()[:, 0]
            if not len(rows):
                break
            numbers = [
                self.requests[row // w].proposing(depth, row % w * self.shape.branches + place)
                for row in rows.tolist()
            ]
            drawn = draw_rows(rest[rows], numbers)
            tokens[rows, place] = drawn
            rest[rows, drawn] = 0
        return tokens.view(n, w, b)

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[n, w, V]` as the target's will be behind the same nodes."""
        logits = over_target(logits, self.draft_ids, self.vocabulary, float("-inf"))
        depth = self._paths.shape[-1]
        rows = [
            request.process(logits[i, place : place + 1], path, depth)
            for i, request in enumerate(self.requests)
            for place, path in enumerate(self._paths[i].tolist())
        ]
        return allowed_if_any(torch.cat(rows).view_as(logits), logits)


def _chances(probs: torch.Tensor, confidence: torch.Tensor | None, b: int) -> torch.Tensor:
    """`[n, w, b]` that each of b draws stands, without a look at any of them.

    Without a confidence head c is the chance that two draws from the drafter are equal. Where the
    drafter has no more tokens, nothing can be drawn.
    """
    c = probs.square().sum(-1) if confidence is None else confidence
    places = torch.arange(b, device=probs.device)
    left = (probs > 0).sum(-1, keepdim=True) > places
    return c[..., None] * (1 - c[..., None]) ** places * left
