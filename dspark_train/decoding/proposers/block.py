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
        self.draft_ids = drafter.draft_ids
        self.draft_head = head if self.draft_ids is None else head.restricted(self.draft_ids)
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
        logits = self._unary(hidden)
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

    def _unary(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the drafter's own vocabulary, without padding of the LM head."""
        logits = self.draft_head.logits(hidden).float()
        if self.draft_ids is None:
            return logits[:, : self.vocabulary]
        if self.vocabulary is None:
            return logits
        return logits.masked_fill(self.draft_ids >= self.vocabulary, float("-inf"))

    def _over_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's usable vocabulary: what cannot be drafted has no mass."""
        if self.draft_ids is None:
            return logits
        size = self.head.vocab_size
        full = logits.new_full((len(logits), size), float("-inf"))
        return full.index_copy(1, self.draft_ids, logits)[:, : self.vocabulary]

    def _independent(
        self,
        logits: torch.Tensor,
        settings: SamplingSettings,
        uniforms: list[float],
        hidden: torch.Tensor,
    ) -> Proposal:
        logits = self._over_target(logits)
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
        logits = self.markov.candidates(logits)
        state = self.markov.start(hidden[:1])
        chosen, rows, embeddings = [], [], []
        for i, u in enumerate(uniforms):
            bias, embedding, state = self.markov.step(state, previous, hidden[i : i + 1])
            biased = self._over_target(logits[i : i + 1] + bias[:, : logits.shape[1]])
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
