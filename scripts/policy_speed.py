"""Scheduling policies side by side in one engine: decoding alone, no server and no prompts read.

    python scripts/policy_speed.py runs/quickstart [--requests 1 4 16] [--minutes 3]

As many requests as asked for are always there: who has finished makes room for the next prompt,
outside the clock. Policies take turns of a few rounds on the same requests, so that a machine which
slows down slows all of them. `auto` starts from the cost table and the calibration, and follows
what rounds take and what becomes of drafts; `auto:static` believes both.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import torch

from dspark_train.artifacts import Artifact
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.generate import SpeculativeDecoder
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.scheduler import POLICIES as POLICY_NAMES
from dspark_train.decoding.scheduler import Scheduler, is_policy, make_scheduler
from dspark_train.decoding.stats import DecodingStats
from dspark_train.serving.costs import engine_costs
from dspark_train.stages.rollout import split_prompts

STATIC = ":static"
POLICIES = ["fixed:0", "fixed:1", "fixed:2", "fixed:3", "fixed:5", f"auto{STATIC}", "auto"]
# rounds of a turn, and turns that only learn
TURN, WARM_UP = 8, 3


@dataclass
class Measured:
    """Rounds of one policy, and the seconds they took."""

    stats: DecodingStats = field(default_factory=DecodingStats)
    seconds: float = 0.0


def measure(
    engine: Engine,
    policies: dict[str, Scheduler],
    requests: int,
    fresh: Iterator[Request],
    seconds: float,
) -> dict[str, Measured]:
    """Rounds of `requests` requests for about so many seconds; every policy has a turn at least."""
    found = {name: Measured() for name in policies}
    began, turn = time.perf_counter(), 0
    while turn <= WARM_UP or time.perf_counter() - began < seconds:
        start = turn % len(policies)
        names = [*policies][start:] + [*policies][:start]
        for name in names:
            engine.scheduler = policies[name]
            for _ in range(TURN):
                while missing := requests - len(engine.requests):
                    engine.add([next(fresh) for _ in range(missing)])
                    engine.take_finished()  # an answer of one token
                since = time.perf_counter()
                rounds = engine.step()
                if turn >= WARM_UP:
                    found[name].seconds += time.perf_counter() - since
                    for one in rounds:
                        found[name].stats.add(one)
                engine.take_finished()
        turn += 1
    for request in list(engine.requests):
        engine.remove(request)
    return found


def stream_of(prompts: Sequence[list[int]], tokens: int, temperature: float) -> Iterator[Request]:
    """Requests without end, of different lengths, so that they do not finish together."""
    for number, prompt in enumerate(cycle(prompts)):
        length = max(tokens // 2, 1) + number * 37 % tokens
        yield Request(prompt, SamplingSettings(temperature, seed=number), length)


def engine_of(decoder: SpeculativeDecoder, rows: int) -> Engine:
    """An engine of the decoder's parts, without requests."""
    return Engine(decoder.target, decoder.proposer, decoder.vocabulary, rows=rows)


def main(given: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--minutes", type=float, default=3.0, help="for each number of requests")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(given)
    if wrong := [one for one in args.policies if not is_policy(one.removesuffix(STATIC))]:
        raise SystemExit(f"--policies {wrong}: expected some of {POLICY_NAMES}")
    if args.threads:
        torch.set_num_threads(args.threads)
    rollout = Artifact.open(args.run / "rollout")
    checkpoint = Artifact.open(args.run / "export").folder("checkpoint")
    decoder = SpeculativeDecoder.from_pretrained(checkpoint)
    config = decoder.proposer.drafter.config
    slots = config.slots.num_proposals
    prompts = [row["prompt"] for row in split_prompts(rollout, "held_out", 64)]
    fresh = stream_of(prompts, args.tokens, args.temperature)
    costs = engine_costs(engine_of(decoder, max(args.requests)), slots, budget=10.0)
    print(
        f"{'requests':>8}  {'policy':<12}{'tokens/s':>10}{'ms a round':>12}{'verified':>10}{'τ':>7}"
    )
    for requests in args.requests:
        engine = engine_of(decoder, requests)
        policies = {
            name: make_scheduler(
                name.removesuffix(STATIC),
                slots,
                costs,
                config.confidence_temperatures,
                padded=engine.pads,
                watch=not name.endswith(STATIC),
                follow=not name.endswith(STATIC),
            )
            for name in args.policies
        }
        for name, one in measure(engine, policies, requests, fresh, 60 * args.minutes).items():
            stats, rounds = one.stats, one.stats.rounds / requests
            print(
                f"{requests:>8}  {name:<12}{stats.committed / one.seconds:>10.1f}"
                f"{1000 * one.seconds / rounds:>12.1f}{stats.proposed / stats.rounds:>10.2f}"
                f"{stats.tau:>7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
