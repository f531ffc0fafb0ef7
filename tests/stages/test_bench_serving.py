"""Policies under load as a stage, on the real server."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.stages import bench_serving
from dspark_train.stages.bench_serving import by_ease, memory
from dspark_train.target.cpu import can_pack, pack_linears
from tests.random_drafter import make_drafter
from tests.tiny_pipeline import Run, refused

FEW = (
    "stages=[bench_serving]",
    "bench_serving.policies=[fixed:0,fixed:2,auto]",
    "bench_serving.concurrency=[1,3]",
    "bench_serving.rounds=1",
    "bench_serving.requests=3",
    "bench_serving.max_new_tokens=12",
    "serve.cost_seconds=0.2",
)


@pytest.mark.slow
def test_policies_side_by_side(tiny_run_finished: Run, tmp_path: Path) -> None:
    ended = tiny_run_finished(*FEW)
    assert ended.status == 0, ended
    folder = tmp_path / "run" / "bench_serving"
    report = json.loads((folder / "report.json").read_text())
    rows = report["rows"]
    assert [(row["policy"], row["concurrency"]) for row in rows] == [
        (name, load) for load in (1, 3) for name in ("fixed:0", "fixed:2", "auto")
    ]
    for half in ("easy", "hard"):  # a run of few requests may have met one half only
        assert any(row[f"{half}_per_user"] > 0 for row in rows)
    for row in rows:
        assert row["errors"] == 0
        assert row["tokens"] == 12 * (3 if row["concurrency"] == 1 else 6)
        assert row["throughput"] > 0
        assert row["token_p50"] <= row["token_p95"] <= row["token_p99"]
        # all tokens but the first of each answer come from rounds
        rounds = sum(row["accepted_histogram"])
        accepted = sum(n * count for n, count in enumerate(row["accepted_histogram"]))
        assert rounds + accepted == row["tokens"] - row["tokens"] // 12
    assert rows[0]["verify_length"] == 0
    assert 1 < rows[1]["verify_length"] <= 2
    paces = [prompt["tokens_per_message"] for prompt in report["prompts"]]
    assert len(paces) > 1
    assert 1 <= min(paces) <= max(paces) <= 8
    assert report["memory"]["drafter_bytes"] > 0
    assert report["memory"]["target_cache_bytes"] > 0
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "costs.json").is_file()


@pytest.mark.slow
def test_an_open_loop_that_ends_in_time(tiny_run_finished: Run, tmp_path: Path) -> None:
    bound = ("bench_serving.seconds=9", "bench_serving.requests=100000", "bench_serving.rate=20")
    ended = tiny_run_finished(*FEW, *bound)
    assert ended.status == 0, ended
    report = json.loads((tmp_path / "run" / "bench_serving" / "report.json").read_text())
    assert len(report["rows"]) == 6
    assert all(row["tokens"] > 0 == row["errors"] for row in report["rows"])


@pytest.mark.parametrize(
    ("pace", "easy"), [([1.0, 1.0, np.nan, 1.0], 2.5), ([3.0, 2.0, np.nan, 1.0], 1.5)]
)
def test_no_half_of_the_prompts_is_empty(pace: list[float], easy: float) -> None:
    """Prompts that are equally easy, and one without an answer."""
    answers = [
        {
            "prompt": i,
            "asked": 0.0,
            "error": None,
            "whole": True,
            "tokens": [(1.0, 1), (2.0, 1 + n)],
        }
        for i, n in ((0, 1), (1, 2), (3, 3))
    ]
    found = by_ease(answers, np.array(pace))
    assert found["hard_per_user"] == (1 if easy == 2.5 else 3)
    assert found["easy_per_user"] == easy


def test_bad_input(tiny_run_finished: Run) -> None:
    wrong = tiny_run_finished(*FEW, "bench_serving.rate=-1")
    refused(wrong, "bench_serving.rate=-1", lines=3)


def test_it_is_served_as_configured(
    tiny_run_finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the verdict of the server, and for answers of any length."""
    real, heard = bench_serving.make_app, {}

    def make_app(batcher, **given):
        heard.update(given)
        return real(batcher, **given)

    monkeypatch.setattr(bench_serving, "make_app", make_app)
    few = ("bench_serving.policies=[fixed:1]", "bench_serving.concurrency=[1]")
    more = ("serve.verdict=matching", "serve.max_new_tokens=4")
    ended = tiny_run_finished(*FEW, *few, "bench_serving.requests=1", *more)
    assert ended.status == 0, ended
    assert heard["verdict"] == "matching"
    assert heard["limits"].max_new_tokens == 12


@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed products for bfloat16"
)
def test_packed_weights_are_counted(random_target) -> None:
    """A drafter that decodes on a CPU keeps most of its weights out of its parameters."""
    target = random_target()
    drafter = make_drafter(target).bfloat16()
    dense = sum(p.nbytes for p in drafter.parameters())
    pack_linears(drafter)
    engine = Engine(target, BlockProposer(drafter, target.head))
    assert memory(engine)["drafter_bytes"] == dense
