"""checkpoint under load: policies side by side, over a real socket, asked by a second process.

A policy serves all of its loads, one after the other, and keeps what it has learnt, as that of a
server would.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import uvicorn
from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config
from dspark_train.decoding.engine import Engine
from dspark_train.serving.app import Limits, make_app
from dspark_train.serving.batching import Batcher
from dspark_train.serving.latency import paces, summary
from dspark_train.serving.metrics import Metrics
from dspark_train.stages.load_report import pareto_figure, show
from dspark_train.stages.report import environment, write_report
from dspark_train.stages.rollout import split_prompts
from dspark_train.stages.serve import make_engine, measured, proposer_facts, scheduler_of
from dspark_train.stages.stage import Outcome
from dspark_train.stages.targets import target_settings
from dspark_train.target.cpu import weight_bytes

MODEL = "target"
BODY_BYTES = 1 << 30  # prompts are our own


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout",) if config.checkpoint else ("rollout", "export")


def settings(config: Config) -> dict[str, Any]:
    return {
        "target": target_settings(config),
        "bench_serving": asdict(config.bench_serving),
        "serve": asdict(config.serve),
        "checkpoint": config.checkpoint,
    }


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Measure, write report.json, report.png and the cost table, print a table."""
    b = config.bench_serving
    if not config.checkpoint:
        inputs["export"].folder("checkpoint")  # checks it
    prompts = split_prompts(inputs["rollout"], "held_out", b.prompts)
    serve = replace(config.serve, rows=max(b.concurrency), policy="fixed")
    engine = make_engine(replace(config, serve=serve))
    slots, temperatures = proposer_facts(config, engine)
    costs = measured(engine, slots, serve.cost_table, serve.cost_seconds)
    schedulers = {
        name: scheduler_of(name, engine, slots, costs, temperatures) for name in b.policies
    }
    rows, heard = [], []
    ids = [row["prompt"] for row in prompts]
    runs = [(load, turn) for load in b.concurrency for turn in range(b.rounds)]
    with tqdm(total=len(runs) * len(b.policies), desc="bench_serving", unit="run") as bar:
        for load, turn in runs:
            # who comes first changes, so that a machine which slows down slows all of them
            start = turn % len(b.policies)
            for name in b.policies[start:] + b.policies[:start]:
                engine.scheduler = schedulers[name]
                row, answers = measure(config, engine, ids, load)
                rows.append({"policy": name, "concurrency": load, "round": turn, **row})
                heard.append(answers)
                bar.update()
    pace = paces([one for answers in heard for one in answers], len(ids))
    for row, answers in zip(rows, heard, strict=True):
        row.update(by_ease(answers, pace))
    report = {
        "environment": environment(engine.target),
        "settings": settings(config),
        "memory": memory(engine),
        "prompts": [
            {"id": row["id"], "category": row["category"], "tokens_per_message": round(each, 3)}
            for row, each in zip(prompts, pace.tolist(), strict=True)
        ],
        "rows": rows,
    }
    writer.write("costs.json", costs.save)
    writer.write("report.json", lambda path: write_report(path, report))
    figure = pareto_figure(rows)
    writer.write("report.png", lambda path: figure.savefig(path, format="png", dpi=120))
    show(rows)
    if failed := sum(row["errors"] for row in rows):
        raise ValueError(f"{failed} requests failed: see {writer.path('report.json')}")
    return Outcome(
        counts={"runs": len(rows), "prompts": len(prompts)},
        facts={"report": "report.json"},
        line=f"{len(b.policies)} policies at {b.concurrency} requests at a time",
    )


def by_ease(answers: list[dict[str, Any]], pace: np.ndarray) -> dict[str, float]:
    """What the easier and the harder half of the prompts get, by what a round commits of them.

    Of equal ones the first are the harder, so that no half is empty.
    """
    kept, found = ("per_user", "token_p50", "token_p95"), {}
    known = np.argsort(pace, kind="stable")[: np.isfinite(pace).sum()]  # NaN comes last
    hard, easy = np.split(known, [len(known) // 2])
    for name, chosen in (("easy", set(easy)), ("hard", set(hard))):
        part = summary([one for one in answers if one["prompt"] in chosen])
        found |= {f"{name}_{key}": part[key] for key in kept}
    return found


def measure(
    config: Config, engine: Engine, prompts: list[list[int]], load: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Serve, ask from another process, and count on both sides; and all answers."""
    b = config.bench_serving
    runs = len(b.policies) * len(b.concurrency) * b.rounds
    metrics = Metrics()
    with serving(config, engine, metrics) as url:
        job = {
            "url": url,
            "model": MODEL,
            "prompts": prompts,
            "requests": max(b.requests, b.requests_per_user * load),
            "users": load,
            "rate": b.rate and b.rate * load,
            "seconds": b.seconds and b.seconds / runs,
            "max_tokens": b.max_new_tokens,
            "temperature": b.temperature,
            "seed": b.seed,
            "bias": {str(token): -100.0 for token in engine.target.eos_ids},
        }
        done = subprocess.run(
            [sys.executable, "-m", "dspark_train.serving.load"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise ValueError(f"the load ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    answers = json.loads(done.stdout)
    return {**summary(answers), **counted(metrics)}, answers


def counted(metrics: Metrics) -> dict[str, Any]:
    """What the server says about its rounds."""
    values = {
        (sample.name.removeprefix("dspark_"), *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    rounds, verified = values["rounds_total",], values["drafts_verified_total",]
    accepted = values["drafts_accepted_sum",]
    upto = sorted(
        (float(key[1]), value)
        for key, value in values.items()
        if key[0] == "drafts_accepted_bucket" and key[1] != "+Inf"
    )
    histogram = [int(b - a) for (_, a), (_, b) in zip([(0, 0), *upto], upto, strict=False)]
    while histogram and not histogram[-1]:
        histogram.pop()
    return {
        "verify_length": round(verified / rounds, 4) if rounds else 0.0,
        "verified_per_token": round((verified + rounds) / (accepted + rounds), 4)
        if rounds
        else 0.0,
        "tau": round((accepted + rounds) / rounds, 4) if rounds else 0.0,
        "accepted_histogram": histogram,
        "preemptions": int(values["preemptions_total",]),
    }


def memory(engine: Engine) -> dict[str, int]:
    """Bytes of weights and caches."""
    drafter = getattr(engine.proposer, "drafter", None)
    weights = 0 if drafter is None else weight_bytes(drafter)
    cache = getattr(engine.proposer, "cache", None)
    return {
        "drafter_bytes": weights,
        "target_cache_bytes": engine.cache.nbytes,
        "drafter_cache_bytes": 0 if cache is None else cache.nbytes,
    }


@contextmanager
def serving(config: Config, engine: Engine, metrics: Metrics) -> Iterator[str]:
    """The server in a thread of this process; its URL."""
    s = config.serve
    batcher = Batcher(
        engine,
        max_waiting=10**6,
        max_positions=s.max_positions,
        chunk=s.chunk,
        metrics=metrics,
    )
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    limits = Limits(
        config.bench_serving.max_new_tokens,
        engine.target.max_positions,
        max_body_bytes=BODY_BYTES,
        timeout=s.timeout,
    )
    app = make_app(batcher, model=MODEL, limits=limits, verdict=s.verdict)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=lambda: server.run(sockets=[taken]), daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise ValueError("the server did not start: see above")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        taken.close()
