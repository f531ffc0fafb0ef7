"""Rollout sampling against transformers' batched `generate`: same prompts, batch and settings.

    python scripts/batch_speed.py runs/quickstart [--batch 32] [--tokens 192] [--minutes 6]

Two comparisons: in "full" all rows run to the last token, so that only passes are compared; in
"ended" rows end at their EOS, and three batches of prompts are answered, as a rollout does it (ours
refills, `generate` waits for the longest row of each batch). Both sides take turns, round by round,
until another round would not fit into the time; one round is always measured. Ours has the target
as a rollout loads it, transformers has its own.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact
from dspark_train.decoding.batch import generate_batch
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.stages.rollout import split_prompts
from dspark_train.target import Target

BATCHES = 3
# how the time is shared out between the two comparisons
SHARES = {"full": 0.4, "ended": 0.6}
Decode = Callable[[list[list[int]], int, bool], int]


def ours(target: Target, prompts: list[list[int]], batch: int, tokens: int, ends: bool) -> int:
    made = generate_batch(
        target,
        prompts,
        SamplingSettings(temperature=0.7),
        slots=batch,
        max_new_tokens=tokens,
        eos_ids=target.eos_ids if ends else (),
        seeds=list(range(len(prompts))),
    )
    return sum(len(one.tokens) for one in made)


@torch.inference_mode()
def theirs(target: Target, prompts: list[list[int]], batch: int, tokens: int, ends: bool) -> int:
    made = 0
    pad = target.tokenizer.pad_token_id or 0
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        longest = max(map(len, rows))
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        output = target.model.generate(
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            do_sample=True,
            temperature=0.7,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            pad_token_id=pad,
            eos_token_id=list(target.eos_ids) if ends else None,
        )[:, longest:]
        for row in output.tolist():
            stop = next((i + 1 for i, x in enumerate(row) if ends and x in target.eos_ids), None)
            made += stop or len(row)
    return made


def rounds(
    name: str, sides: dict[str, Decode], prompts: list[list[int]], tokens: int, seconds: float
) -> dict[str, list[float]]:
    """Tokens per second of each side, of as many rounds as fit into the time, one at least."""
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    begin, last = time.perf_counter(), 0.0
    while not speeds["ours"] or time.perf_counter() - begin + last < seconds:
        last = -time.perf_counter()
        for side, decode in sides.items():
            since = time.perf_counter()
            made = decode(prompts, tokens, name == "ended")
            took = time.perf_counter() - since
            speeds[side].append(made / took)
            print(
                f"{name:<6} round {len(speeds[side])}: {side:<12} {made:>7,} tokens in "
                f"{took:>6.1f} s, {made / took:>6,.0f} tokens/s",
                flush=True,
            )
        last += time.perf_counter()
    return speeds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--dtype", help="of the target; default: that of the run")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    rollout = Artifact.open(given.run / "rollout")
    name, dtype = (rollout.settings["target"][key] for key in ("name", "dtype"))
    dtype = given.dtype or dtype
    target, stock = (Target.load(name, dtype=dtype, pack=pack) for pack in (True, False))
    stock.model.generation_config.eos_token_id = None  # given with each call
    sides: dict[str, Decode] = {
        "ours": lambda rows, tokens, ends: ours(target, rows, given.batch, tokens, ends),
        "transformers": lambda rows, tokens, ends: theirs(stock, rows, given.batch, tokens, ends),
    }
    found = [row["prompt"] for row in split_prompts(rollout, "train", BATCHES * given.batch)]
    print(
        f"{name}, {dtype}, {given.threads} threads, batch {given.batch}, {given.tokens} new "
        "tokens, T 0.7"
    )
    measured = {}
    for part, share in SHARES.items():
        prompts = found[: given.batch] if part == "full" else found
        for decode in sides.values():
            decode(prompts[: given.batch], 4, part == "ended")  # warm up
        seconds = 60 * given.minutes * share
        measured[part] = len(prompts), rounds(part, sides, prompts, given.tokens, seconds)
    for part, (count, speeds) in measured.items():
        a, b = (statistics.median(speeds[side]) for side in sides)
        print(
            f"{part:<6} {count} prompts: ours {a:,.0f} tokens/s, transformers {b:,.0f} tokens/s, "
            f"{a / b:.2f} times (medians of {len(speeds['ours'])})"
        )


if __name__ == "__main__":
    main()
