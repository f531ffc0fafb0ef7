"""`stages=[certify]`: is decoding lossless with this checkpoint, target, sampler and engine?

Five questions, each answered by the real decoder on real prompts. The answer is certificate.json
and a page of Markdown; the command fails where one of them is no.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dspark_train.config import Config
from dspark_train.data.encode import encode_prompts
from dspark_train.data.spread import spread
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.audit import audit
from dspark_train.decoding.batch import decode_all
from dspark_train.decoding.certificate import FAULTS, compare, detectable, round_law
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import PlainProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.disk import write_atomically
from dspark_train.formats import load_config
from dspark_train.stages.decoders import checkpoint_of
from dspark_train.stages.divergence import first_divergence
from dspark_train.stages.report import environment
from dspark_train.stages.targets import device, load_target, require_same_target

EXACT = 1e-5  # of a probability: bisection and float32
LEVEL = 1e-3  # chance of a false alarm of all comparisons together
OUTPUT = 3  # tokens that make an output for the comparison


@dataclass(frozen=True)
class Check:
    """One question: whether it holds, in words, and its numbers."""

    name: str
    passed: bool
    says: str
    numbers: dict[str, Any]


def settings(config: Config) -> dict[str, Any]:
    """The groups of the configuration that are read here."""
    return {name: asdict(getattr(config, name)) for name in ("target", "prompts", "certify")}


def run(config: Config) -> None:
    """Write the certificate.

    Raises:
        ValueError: a check that fails, or no checkpoint where the proposer needs one.
    """
    decoder, checkpoint = load(config)
    with TemporaryDirectory() as folder:
        encoded = Path(folder) / "prompts.jsonl"
        encode_prompts(config.prompts, "last", decoder.target, encoded)
        rows = [json.loads(line) for line in encoded.read_text().splitlines()]
    prompts = spread(rows, config.certify.prompts)
    bench = Bench(config, decoder, prompts)
    checks = []
    for make in (bench.law, bench.faults, bench.samples, bench.greedy, bench.caches):
        checks.append(make())
        print(f"certify    {'yes' if checks[-1].passed else 'NO '}  {checks[-1].says}")
    report = {
        "lossless": all(check.passed for check in checks),
        "checkpoint": checkpoint,
        "target": decoder.target.fingerprint(),
        "settings": asdict(config.certify),
        "prompts": [prompt["id"] for prompt in prompts],
        "environment": environment(decoder.target),
        "checks": [asdict(check) for check in checks],
    }
    folder = Path(config.run_dir) / "certify"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "certificate.json", json.dumps(report, indent=1).encode())
    write_atomically(folder / "certificate.md", page(report).encode())
    if failed := [check.name for check in checks if not check.passed]:
        raise ValueError(f"not certified: {', '.join(failed)}; see {folder / 'certificate.md'}")
    print(f"certify    lossless: {folder / 'certificate.md'}")


def load(config: Config) -> tuple[SpeculativeDecoder, str | None]:
    """The decoder to certify, and where its drafter lies."""
    proposer = config.certify.proposer
    checkpoint = checkpoint_of(config, proposer)
    target = load_target(config)
    if checkpoint:
        require_same_target(target, load_config(checkpoint).target, checkpoint)
    decoder = SpeculativeDecoder.from_pretrained(
        checkpoint, target, proposer=proposer, device=str(device(config))
    )
    return decoder, checkpoint


class Bench:
    """The checks, on the same prompts."""

    def __init__(
        self, config: Config, decoder: SpeculativeDecoder, prompts: list[dict[str, Any]]
    ) -> None:
        c = self.c = config.certify
        self.decoder, self.target, self.prompts = decoder, decoder.target, prompts
        self.sampler = SamplingSettings(c.temperature, c.top_k, c.top_p, c.min_p)

    def engine(self, rows: int = 1, plain: bool = False) -> Engine:
        proposer = PlainProposer() if plain else self.decoder.proposer
        return Engine(self.target, proposer, self.decoder.vocabulary, rows=rows)

    def law(self) -> Check:
        """1: the exact law of rounds on a reduced vocabulary."""
        found = [round_law(*self.reduced(prompt), self.c.length) for prompt in self.prompts[:2]]
        error = max(law.error for law in found)
        rounding = max(law.pass_error for law in found)
        followed = sum(law.proposals for law in found)
        return Check(
            "exact law of a round",
            error < EXACT and rounding < self.tolerance,
            f"{followed} proposals followed over all random numbers: no probability differs by "
            f"more than {error:.1e}; passes with and without cache agree to {rounding:.1e}",
            {"error": error, "pass_error": rounding, "proposals": followed},
        )

    def faults(self) -> Check:
        """2: the same computation finds what is planted."""
        errors, drafts = dict.fromkeys(sorted(FAULTS), 0.0), 0
        for name in errors:
            for prompt in self.prompts[:2]:
                engine, request = self.reduced(prompt)
                engine.decide = FAULTS[name]
                law = round_law(engine, request, self.c.length)
                errors[name], drafts = max(errors[name], law.error), max(drafts, law.drafts)
        expected = set(errors) if drafts else set()  # without drafts none of them does anything
        if self.sampler.greedy or self.c.proposer == "lookup":
            expected.discard("misremembers_the_drafter")  # there is nothing to remember
        missed = sorted(name for name in expected if errors[name] < 1e-3)
        return Check(
            "planted faults are found",
            not missed,
            "; ".join(f"{name.replace('_', ' ')}: off by {errors[name]:.2g}" for name in errors)
            + (f"; NOT found: {missed}" if missed else ""),
            {"errors": errors, "expected": sorted(expected)},
        )

    def samples(self) -> Check:
        """3: outputs on the whole vocabulary against plain decoding."""
        if self.sampler.greedy:
            says = "nothing to compare: decoding is greedy"
            return Check("sampled outputs", True, says, {"samples": 0})
        level = LEVEL / len(self.prompts)
        results, seen = [], []
        for prompt in self.prompts:
            ours = self.outputs(prompt["prompt"], 0, plain=False)
            theirs = self.outputs(prompt["prompt"], self.c.samples, plain=True)
            results.append(compare(ours, theirs))
            seen.append(detectable(theirs, level))
        least = min(result.p_value for result in results)
        return Check(
            "sampled outputs",
            least >= level,
            f"{self.c.samples} outputs of {OUTPUT} tokens for each of {len(results)} prompts: the "
            f"smallest p-value is {least:.3g} (alarm below {level:.1g}); a change of "
            f"{max(seen):.0%} of the mass would be found nine times in ten",
            {"comparisons": [asdict(one) for one in results], "detectable": seen, "level": level},
        )

    def greedy(self) -> Check:
        """4: greedy output against plain decoding, token by token."""
        ours, theirs = (self.decoded(SamplingSettings(), plain) for plain in (False, True))
        found = [
            first_divergence(self.target, prompt["id"], prompt["prompt"], a, b)
            for prompt, a, b in zip(self.prompts, ours, theirs, strict=True)
        ]
        parted = [one for one in found if one is not None]
        unexplained = [one for one in parted if not one.near_tie]
        tokens = sum(map(len, theirs))
        return Check(
            "greedy identity",
            not unexplained,
            f"{tokens} tokens: {len(parted)} of {len(found)} outputs part at a near tie of logits, "
            f"{len(unexplained)} for no such reason",
            {"near_ties": [asdict(d) for d in parted], "unexplained": len(unexplained)},
        )

    def caches(self) -> Check:
        """5: caches of a ragged batch against fresh readings, in the middle of decoding."""
        engine = self.engine(rows=len(self.prompts))
        engine.add([self.request(p["prompt"], self.sampler, seed) for seed, p in self.numbered()])
        worst, rounds = 0.0, 0
        while engine.requests and rounds < 4:
            engine.take_finished()
            if engine.requests:
                engine.step()
                worst, rounds = max(worst, audit(engine)), rounds + 1
        return Check(
            "caches",
            worst < self.tolerance,
            f"after each of {rounds} rounds no entry differs from a fresh prefill by more than "
            f"{worst:.1e} of the largest",
            {"difference": worst, "rounds": rounds},
        )

    @property
    def tolerance(self) -> float:
        """What rounding alone explains."""
        return (
            16 * torch.finfo(self.target.dtype).eps if self.target.dtype != torch.float32 else 1e-3
        )

    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return ((self.c.seed + i, prompt) for i, prompt in enumerate(self.prompts))

    def request(self, prompt: list[int], sampler: SamplingSettings, seed: int) -> Request:
        room = self.target.max_positions - len(prompt)
        limit = min(self.c.max_new_tokens, room)
        return Request(prompt, replace(sampler, seed=seed), limit, self.target.eos_ids)

    def reduced(self, prompt: dict[str, Any]) -> tuple[Engine, Request]:
        """An engine and its request, which may say the few tokens that are likeliest now."""
        ids = torch.tensor([prompt["prompt"]], device=self.target.device)
        if self.c.vocabulary > self.decoder.vocabulary:
            raise ValueError(
                f"certify.vocabulary={self.c.vocabulary}: target {self.target.name} has only "
                f"{self.decoder.vocabulary} tokens; the law is followed over a few, such as 3"
            )
        last = self.target.forward(ids).last_hidden[0, -1]
        logits = self.target.head.logits(last)[: self.decoder.vocabulary]
        allowed = logits.topk(self.c.vocabulary).indices.tolist()
        # flat enough that all of them come, with the filters of the sampler
        sampler = replace(self.sampler, allowed_tokens=allowed)
        request = Request(prompt["prompt"], sampler, 2 * self.c.length + 2)
        engine = self.engine()
        engine.add([request])
        return engine, request

    def outputs(self, prompt: list[int], first_seed: int, plain: bool) -> list[tuple[int, ...]]:
        seeds = range(self.c.seed + first_seed, self.c.seed + first_seed + self.c.samples)
        requests = [
            Request(prompt, replace(self.sampler, seed=seed), OUTPUT, self.target.eos_ids)
            for seed in seeds
        ]
        decode_all(self.engine(min(self.c.rows, len(requests)), plain), requests)
        return [tuple(request.new_tokens) for request in requests]

    def decoded(self, sampler: SamplingSettings, plain: bool) -> list[list[int]]:
        requests = [self.request(p["prompt"], sampler, seed) for seed, p in self.numbered()]
        # one at a time: a batch rounds otherwise than a single row
        decode_all(self.engine(1, plain), requests)
        return [request.new_tokens for request in requests]


def page(report: dict[str, Any]) -> str:
    """The certificate as Markdown."""
    verdict = "lossless" if report["lossless"] else "NOT lossless"
    where = report["environment"]
    lines = [
        f"# Certificate: decoding is {verdict}",
        "",
        f"Target `{report['target']['name']}`, drafter `{report['checkpoint'] or 'none'}`, "
        f"on {where.get('device', 'cpu')} with torch {where.get('torch', torch.__version__)}.",
        "",
        "| check | holds | in numbers |",
        "|---|---|---|",
        *(
            f"| {check['name']} | {'yes' if check['passed'] else '**no**'} | {check['says']} |"
            for check in report["checks"]
        ),
        "",
        "Settings: "
        + ", ".join(f"{key} {value}" for key, value in report["settings"].items())
        + ".",
    ]
    return "\n".join(lines) + "\n"
