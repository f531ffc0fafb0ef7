"""Target passes at a few fixed shapes, so that they can be recorded (`recording.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_train.decoding.cache import KVCache, additive_mask
from dspark_train.decoding.recording import Recorder, Work, room, tier
from dspark_train.target import Target, TargetOutput

HOST_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class FixedPass:
    """One shape: what changes from pass to pass, and the work.

    Attributes:
        ids: `[n, q]` tokens.
        starts: `[n]` positions that the cache holds of each row.
        work: gives last hidden states `[n, q, D]`, features or None, and logits `[n, q, V]`.
    """

    ids: torch.Tensor
    starts: torch.Tensor
    work: Work


class FixedPasses:
    """Passes over lists of tokens behind the rows of a cache, padded to the next tier.

    Tiers (`recording.tier`) are of rows (at most all), of tokens a row, and of the positions that
    attention sees, in blocks of the cache. Rows beyond those that are read lie free in the cache;
    they are written to.

    Args:
        target: without recurrent layers.
        cache: of the target.
        rows: that may be written to, from the first on.
        taps: layers whose outputs are wanted.

    Raises:
        ValueError: a target with recurrent layers, or with angles that depend on how long the text
            is: the host reads that in every pass.
    """

    def __init__(self, target: Target, cache: KVCache, rows: int, taps: Sequence[int]) -> None:
        given = f"target.{'compile' if target.compiles else 'graphs'}=false"
        if target.recurrent:
            raise ValueError(
                f"target {target.name} has recurrent layers, whose states are put back between "
                f"passes: fixed shapes cannot decode it; take {given}"
            )
        rope = getattr(target.model.config.get_text_config(), "rope_parameters", None) or {}
        kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
        if wrong := {part.get("rope_type") for part in kinds} & HOST_ROPE:
            raise ValueError(
                f"target {target.name} has positions of type {sorted(wrong)}, which read the "
                f"length of the text on the host: fixed shapes cannot decode it; take {given}"
            )
        self.target, self.cache, self.rows, self.taps = target, cache, rows, taps
        self.recorder = Recorder.of(target, target.layers)

    def read(self, read: Sequence[Sequence[int]]) -> tuple[TargetOutput, torch.Tensor]:
        """As `read_ragged` over the active rows, which are the first ones; and logits `[n, q, V]`.

        All are overwritten by the next pass.
        """
        cache, count = self.cache, len(read)
        lengths = cache.active_lengths
        n, q = tier(count, self.rows), tier(max(map(len, read)))
        end = room(cache, max(lengths) + q)
        fixed: FixedPass = self.recorder.get(
            (n, q, end), lambda: self._make(n, q, end), cache.capacity
        )
        padded = [[*tokens, *[0] * (q - len(tokens))] for tokens in read] + [[0] * q] * (n - count)
        fixed.ids.copy_(torch.tensor(padded))
        fixed.starts.copy_(torch.tensor([*lengths, *[0] * (n - count)]))
        hidden, features, logits = fixed.work()
        cache.advance(q)
        features = None if features is None else features[:count]
        return TargetOutput(hidden[:count], features), logits[:count]

    def _make(self, n: int, q: int, end: int) -> FixedPass:
        target, cache, device = self.target, self.cache, self.target.device
        ids = torch.zeros(n, q, dtype=torch.long, device=device)
        starts = torch.zeros(n, dtype=torch.long, device=device)
        rows, offsets = (torch.arange(size, device=device) for size in (n, q))

        def work() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
            places = starts[:, None] + offsets
            with cache.writing((rows[:, None], places), end):
                output = target.forward(
                    ids,
                    # padding may reach beyond the context, where a table of positions ends
                    position_ids=places.clamp(max=target.max_positions - 1),
                    attention_mask=self._masks(places, end),
                    cache=cache,
                    taps=self.taps,
                )
            return output.last_hidden, output.features, target.head.logits(output.last_hidden)

        return FixedPass(ids, starts, self.recorder.record(work))

    def _masks(self, places: torch.Tensor, end: int) -> torch.Tensor | dict[str, torch.Tensor]:
        window, dtype = self.target.sliding_window, self.target.dtype
        full = additive_mask(places, end, dtype)
        if window is None:
            return full
        sliding = additive_mask(places, end, dtype, window)
        if not self.target.masks_by_layer_type:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}
