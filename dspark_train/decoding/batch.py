"""Plain sampling of many prompts at once: ragged rows, refilled as they finish."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.randomness import keyed_uniforms, seed_array
from dspark_train.decoding.request import FinishReason
from dspark_train.decoding.sampling import (
    SamplingSettings,
    draw_rows,
    most_likely,
    usable_vocabulary,
    warp,
)
from dspark_train.target import Target

# a pass over this many prompt tokens uses the hardware well, a larger one only takes memory
_PREFILL_TOKENS = 1024


class Sampled(NamedTuple):
    """New token ids (an EOS included), and why they end."""

    tokens: list[int]
    finish_reason: FinishReason


class _Row:
    """A live request: where it came from and its tokens."""

    def __init__(self, index: int, prompt: Sequence[int], limit: int) -> None:
        self.index, self.tokens = index, list(prompt)
        self.prompt_length, self.end = len(prompt), len(prompt) + limit
        self.finished = False


class _Sampler:
    """Draws the next token of every row, as the engine draws without a proposal."""

    def __init__(self, target: Target, settings: SamplingSettings, seeds: Sequence[int]) -> None:
        self.target, self.settings, self.seeds = target, settings, seed_array(list(seeds))
        self.vocabulary = usable_vocabulary(target.tokenizer, target.vocab_size)

    def __call__(self, last_hidden: torch.Tensor, rows: Sequence[_Row]) -> list[int]:
        """Tokens of n rows, from hidden states `[n, D]` of their last positions."""
        logits = self.target.head.logits(last_hidden)[:, : self.vocabulary]
        if self.settings.greedy:
            return most_likely(logits).tolist()
        seeds = self.seeds[[row.index for row in rows]]
        positions = np.array([len(row.tokens) for row in rows], dtype=np.uint64)
        uniforms = torch.from_numpy(keyed_uniforms(seeds, positions, "resample"))
        return draw_rows(warp(logits, self.settings), uniforms.to(logits.device)).tolist()


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    *,
    slots: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    seeds: Sequence[int],
    progress: Callable[[int, Sampled], None] | None = None,
) -> list[Sampled]:
    """Sample one continuation per prompt.

    A prompt's output depends on its own ids, its seed and the settings: a single request with the
    same seed gives the same tokens, up to what batching does to floating point.

    Args:
        target: the frozen model.
        prompts: token ids, at least one each.
        settings: one sampler for all; its own seed is not used.
        slots: rows in a pass at most.
        max_new_tokens: per prompt; the context may end it earlier.
        eos_ids: ids that end a response; may be empty.
        seeds: one per prompt.
        progress: called with (index, output) as each prompt finishes.

    Returns:
        Outputs in the order of `prompts`.

    Raises:
        ValueError: lengths that differ, an empty prompt, or one that fills the context.
    """
    _check(target, prompts, slots, max_new_tokens, seeds)
    sample, stops = _Sampler(target, settings, seeds), frozenset(eos_ids)
    cache = KVCache(target.num_layers, num_rows=min(slots, max(len(prompts), 1)))
    # long prompts first: rows of like length share a pass, and the last ones to finish are short
    waiting = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    outputs: dict[int, Sampled] = {}
    rows: list[_Row] = []

    def commit(row: _Row, token: int) -> None:
        row.tokens.append(token)
        row.finished = token in stops or len(row.tokens) == row.end
        if row.finished:
            reason = "stop" if token in stops else "length"
            outputs[row.index] = Sampled(row.tokens[row.prompt_length :], reason)
            if progress is not None:
                progress(row.index, outputs[row.index])

    while waiting or rows:
        fresh: list[_Row] = []
        while waiting and len(rows) + len(fresh) < cache.num_rows:
            prompt = prompts[waiting[-1]]
            if fresh and (len(fresh) + 1) * fresh[0].prompt_length > _PREFILL_TOKENS:
                break
            room = target.max_positions - len(prompt)
            fresh.append(_Row(waiting.pop(), prompt, min(max_new_tokens, room)))
        if fresh:
            read, hidden = fresh, _prefill(target, cache, len(rows), fresh)
            rows += fresh
        else:
            read, hidden = rows, _advance(target, cache, rows)
        for row, token in zip(read, sample(hidden, read), strict=True):
            commit(row, token)
        _drop_finished(cache, rows)
    return [outputs[index] for index in range(len(prompts))]


def _drop_finished(cache: KVCache, rows: list[_Row]) -> None:
    """Keep the rows that go on, without gaps between them."""
    # from the back, so that the row which fills a gap is one that goes on
    for place in reversed(range(len(rows))):
        if rows[place].finished:
            last = rows.pop()
            if place < len(rows):
                rows[place] = last
                cache.move_row(len(rows), place)


def _prefill(target: Target, cache: KVCache, first: int, rows: Sequence[_Row]) -> torch.Tensor:
    """Read prompts into the places from `first` on; hidden states `[n, D]` of their last tokens.

    Shorter prompts are padded behind their end, where causal attention needs no mask; the cache
    is then cut back to the true lengths.
    """
    lengths = [row.prompt_length for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : row.prompt_length] = torch.tensor(row.tokens)
    ids = ids.to(target.device)
    cache.activate(first, first + len(rows))
    cache.truncate([0] * len(rows))
    cache.reserve(max(row.end for row in rows))
    output = target.forward(ids, position_ids=_positions([0] * len(rows), ids), cache=cache)
    cache.truncate(lengths)
    last = torch.tensor(lengths, device=target.device) - 1
    return output.last_hidden[torch.arange(len(rows), device=target.device), last]


def _advance(target: Target, cache: KVCache, rows: Sequence[_Row]) -> torch.Tensor:
    """Read each row's last token; returns hidden states `[n, D]`."""
    cache.activate(0, len(rows))
    ids = torch.tensor([[row.tokens[-1]] for row in rows], device=target.device)
    output = target.forward(
        ids,
        position_ids=_positions(cache.active_lengths, ids),
        attention_mask=cache.mask(1, target.dtype, target.device),
        cache=cache,
    )
    return output.last_hidden[:, -1]


def _positions(starts: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    starts = torch.tensor(starts, device=ids.device)
    return starts[:, None] + torch.arange(ids.shape[1], device=ids.device)


def _check(
    target: Target,
    prompts: Sequence[Sequence[int]],
    slots: int,
    max_new_tokens: int,
    seeds: Sequence[int],
) -> None:
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(seeds)} seeds: give one per prompt")
    if slots < 1 or max_new_tokens < 1:
        raise ValueError(f"slots={slots}, max_new_tokens={max_new_tokens}: expected at least 1")
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < target.max_positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, expected 1 to "
                f"{target.max_positions - 1} for target {target.name}"
            )
