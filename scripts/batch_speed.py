"""Rollout sampling against transformers' batched `generate`: same prompts, batch and settings.

    python scripts/batch_speed.py runs/quickstart [--batch 32] [--tokens 192] [--threads 2]

Two comparisons, each interleaved: "full" rows all run to the last token; in "ended" ones rows end
at their EOS, and three batches of prompts are answered (ours refills, `generate` waits for the
longest row of each batch).
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact
from dspark_train.decoding.batch import generate_batch
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.stages.rollout import split_prompts
from dspark_train.target import Target


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rollout = Artifact.open(given.run / "rollout")
    target = Target.load(rollout.facts["target"]["name"], dtype=given.dtype)
    target.model.generation_config.eos_token_id = None  # given with each call
    found = [row["prompt"] for row in split_prompts(rollout, "train", 3 * given.batch)]
    for ends, prompts in ((False, found[: given.batch]), (True, found)):
        for decode in (ours, theirs):
            decode(target, prompts[: given.batch], given.batch, 4, ends)  # warm up
        speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(given.repeat):
            for name, decode in (("ours", ours), ("theirs", theirs)):
                begin = time.perf_counter()
                made = decode(target, prompts, given.batch, given.tokens, ends)
                speeds[name].append(made / (time.perf_counter() - begin))
        a, b = (statistics.median(speeds[name]) for name in ("ours", "theirs"))
        print(
            f"{'ended' if ends else 'full':<6} {len(prompts)} prompts, batch {given.batch}, "
            f"{given.tokens} new tokens, T 0.7: ours {a:,.0f} tokens/s, transformers {b:,.0f} "
            f"tokens/s, {a / b:.2f} times (medians of {given.repeat})"
        )


if __name__ == "__main__":
    main()
