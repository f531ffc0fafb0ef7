"""Many requests through one engine: rows are refilled as they finish."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import PlainProposer, Proposer
from dspark_train.decoding.request import FinishReason, Request
from dspark_train.decoding.sampling import SamplingSettings, usable_vocabulary
from dspark_train.decoding.stats import DecodingStats
from dspark_train.target import Target

# a pass over this many prompt tokens uses the hardware well, a larger one only takes memory
_PREFILL_TOKENS = 1024


def decode_all(
    engine: Engine,
    requests: Sequence[Request],
    progress: Callable[[int, Request], None] | None = None,
    *,
    rows: int | None = None,
) -> list[DecodingStats]:
    """Run requests to their ends, as many at a time as the engine has rows.

    Args:
        engine: with no request in it.
        requests: not begun.
        progress: called with (index, request) as each one finishes.
        rows: as many at a time, if that is less than the engine has.

    Returns:
        The statistics of each; a request's seconds are its shares of the rounds it was in.
    """
    unused = engine.rows - (rows or engine.rows)
    stats = [DecodingStats(requests=1, tokens=1) for _ in requests]
    index = {id(request): i for i, request in enumerate(requests)}
    # long prompts first: rows of like length share a pass, and the last ones to finish are short
    waiting = sorted(range(len(requests)), key=lambda i: (requests[i].prompt_length, i))
    while waiting or engine.requests:
        fresh: list[Request] = []
        while waiting and len(fresh) < engine.free - unused:
            if fresh and (len(fresh) + 1) * fresh[0].prompt_length > _PREFILL_TOKENS:
                break
            fresh.append(requests[waiting.pop()])
        if fresh:
            seconds = engine.add(fresh) / len(fresh)
            for request in fresh:
                stats[index[id(request)]].seconds["prefill"] = seconds
        else:
            for request, round_ in zip(engine.requests, engine.step(), strict=True):
                stats[index[id(request)]].add(round_)
        for request in engine.take_finished():
            if progress is not None:
                progress(index[id(request)], request)
    return stats


class Sampled(NamedTuple):
    """New token ids (an EOS included), and why they end."""

    tokens: list[int]
    finish_reason: FinishReason


def generate_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    *,
    slots: int,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    seeds: Sequence[int],
    proposer: Proposer | None = None,
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
        proposer: drafts ahead, over the target's usable vocabulary; without one nothing does. The
            distribution is the same.
        progress: called with (index, output) as each prompt finishes.

    Returns:
        Outputs in the order of `prompts`.

    Raises:
        ValueError: lengths that differ, an empty prompt, or one that fills the context.
    """
    _check(target, prompts, slots, max_new_tokens, seeds)
    vocabulary = usable_vocabulary(target.tokenizer, target.vocab_size)
    rows = min(slots, max(len(prompts), 1))
    engine = Engine(target, proposer or PlainProposer(), vocabulary, rows=rows)
    requests = [
        Request(
            list(prompt),
            replace(settings, seed=seed),
            min(max_new_tokens, target.max_positions - len(prompt)),
            tuple(eos_ids),
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]

    def sampled(request: Request) -> Sampled:
        return Sampled(request.new_tokens, request.finish_reason)

    decode_all(
        engine,
        requests,
        progress and (lambda index, request: progress(index, sampled(request))),
    )
    return [sampled(request) for request in requests]


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
