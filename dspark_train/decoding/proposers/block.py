"""The block drafter as a proposer: one parallel pass, then a walk of the sequential head."""

import torch

from dspark_train.decoding.cache import DraftCache
from dspark_train.decoding.proposers.base import Proposal
from dspark_train.decoding.randomness import Randomness
from dspark_train.decoding.sampling import SamplingSettings, draw, most_likely, warp
from dspark_train.drafter import Drafter
from dspark_train.target import TargetHead


class BlockProposer:
    """Proposes with a `Drafter`, either block convention, any sequential head.

    Args:
        drafter: in the dtype and on the device of the target.
        head: the target's embedding and LM head.
        vocabulary: ids from here on get no mass (padding of the LM head); None: all rows count.
        use_heads: False drafts every slot on its own, without the sequential head.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        vocabulary: int | None = None,
        use_heads: bool = True,
    ) -> None:
        config = drafter.config
        self.drafter, self.head, self.vocabulary = drafter.eval(), head, vocabulary
        self.taps = tuple(config.target_layer_ids)
        self.markov = drafter.markov_head if use_heads else None
        # a confidence that was trained on drafts of the sequential head says nothing without it
        self.confidence = drafter.confidence_head if use_heads else None
        self.cache = DraftCache(config.num_hidden_layers)

    def start(self, prompt: list[int]) -> None:
        self.cache.truncate([0])

    def observe(self, features: torch.Tensor | None, tokens: list[int]) -> None:
        start = self.cache.length
        positions = torch.arange(start, start + len(tokens), device=features.device)[None]
        self.cache.append(self.drafter.context_kv(features, positions))

    def propose(
        self, tokens: list[int], settings: SamplingSettings, randomness: Randomness, limit: int
    ) -> Proposal:
        anchor = len(tokens) - 1
        if self.cache.length != anchor:
            raise RuntimeError(
                f"the drafter's cache holds {self.cache.length} positions, expected the {anchor} "
                "before the anchor: every target pass must be observed"
            )
        hidden = self._block(tokens[anchor], anchor)[:limit]
        first = torch.tensor([tokens[anchor]], device=hidden.device)
        logits = self.head.logits(hidden).float()
        uniforms = [randomness.uniform(anchor + 1 + i, "propose") for i in range(len(hidden))]
        if self.markov is None:
            return self._independent(logits, settings, uniforms, hidden)
        return self._walk(logits, settings, uniforms, hidden, first)

    def _block(self, token: int, anchor: int) -> torch.Tensor:
        """Hidden states `[P, D]` of the slots that propose."""
        slots, device = self.drafter.slots, self.head.projection.weight.device
        ids = slots.inputs(
            torch.tensor([[token]], device=device), self.drafter.config.mask_token_id
        )
        positions = slots.positions(torch.tensor([[anchor]], device=device))
        hidden = self.drafter.backbone(self.head.embed(ids), positions, self.cache.context())
        return hidden[0, 0, slots.proposing]

    def _independent(
        self,
        logits: torch.Tensor,
        settings: SamplingSettings,
        uniforms: list[float],
        hidden: torch.Tensor,
    ) -> Proposal:
        logits = logits[:, : self.vocabulary]
        confidence = None if self.confidence is None else self.confidence.logits(hidden, None)
        if settings.greedy:
            return Proposal(most_likely(logits).tolist(), None, confidence)
        probs = warp(logits, settings)
        tokens = [draw(row, u) for row, u in zip(probs, uniforms, strict=True)]
        return Proposal(tokens, probs, confidence)

    def _walk(
        self,
        logits: torch.Tensor,
        settings: SamplingSettings,
        uniforms: list[float],
        hidden: torch.Tensor,
        previous: torch.Tensor,
    ) -> Proposal:
        """Left to right; each slot's bias sees the token that was drawn before it."""
        state = self.markov.start(hidden[:1])
        chosen, rows, embeddings = [], [], []
        for i, u in enumerate(uniforms):
            bias, embedding, state = self.markov.step(state, previous, hidden[i : i + 1])
            biased = (logits[i : i + 1] + bias)[:, : self.vocabulary]
            if settings.greedy:
                previous = most_likely(biased)
            else:
                probs = warp(biased, settings)
                rows.append(probs)
                previous = torch.tensor([draw(probs[0], u)], device=hidden.device)
            chosen.append(previous)
            embeddings.append(embedding)
        confidence = None
        if self.confidence is not None:
            confidence = self.confidence.logits(hidden, torch.cat(embeddings))
        tokens = torch.cat(chosen).tolist()
        return Proposal(tokens, torch.cat(rows) if rows else None, confidence)
