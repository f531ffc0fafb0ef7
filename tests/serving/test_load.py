"""Times of answers by hand, and load on a real server from a second process."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest

from dspark_train.serving.latency import paces, summary
from dspark_train.serving.load import Job, run
from tests.serving.served import MODEL, serving


def test_summary_by_hand() -> None:
    good = {"error": None, "whole": True}
    answers = [
        {"asked": 0.0, "tokens": [(1.0, 1), (2.0, 3), (4.0, 5)], "prompt": 0, **good},
        {"asked": 1.0, "tokens": [(1.5, 2), (2.5, 3)], "prompt": 1, **good, "whole": False},
        {"asked": 1.0, "tokens": [], "error": "status 500", "prompt": 2, "whole": False},
    ]
    found = summary(answers)
    assert found["tokens"] == 8
    assert found["errors"] == 1
    assert found["throughput"] == pytest.approx(8 / 4)
    assert found["per_user"] == pytest.approx((4 / 3 + 1) / 2)
    assert found["first_p50"] == pytest.approx(0.75)
    # waits: .5 .5 (two tokens in one second), 1 1 (two in two), 1
    assert found["token_p50"] == pytest.approx(1.0)
    assert found["cut"] == 1
    assert summary([answers[2]])["throughput"] == 0
    # four tokens in two messages, one in one, none
    assert paces(answers, 3)[:2].tolist() == [2.0, 1.0]
    assert np.isnan(paces(answers, 3)[2])


@pytest.mark.parametrize("rate", [None, 20.0])
def test_load_from_a_second_process(tiny_target, rate) -> None:
    with serving(tiny_target, rows=3) as one:
        job = {
            "url": one.url,
            "model": MODEL,
            "prompts": [[5, 6, 7], [9]],
            "requests": 7,
            "users": 3,
            "rate": rate,
            "max_tokens": 10,
            "bias": {str(token): -100 for token in tiny_target.eos_ids},
        }
        done = subprocess.run(
            [sys.executable, "-m", "dspark_train.serving.load"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            check=True,
        )
    answers = json.loads(done.stdout)
    assert len(answers) == 7
    assert all(one["error"] is None for one in answers)
    assert all(one["tokens"][-1][1] == 10 for one in answers)
    assert summary(answers)["tokens"] == 70
    assert all(one["whole"] for one in answers)
    assert [one["prompt"] for one in answers] == [0, 1, 0, 1, 0, 1, 0]
    for one in answers:
        counts = [count for _, count in one["tokens"]]
        assert counts == sorted(counts)


@pytest.mark.parametrize("rate", [None, 100.0])
def test_a_load_ends_in_time_with_what_it_got(tiny_target, rate) -> None:
    with serving(tiny_target, rows=3) as one:
        real = one.batcher.engine.step

        def slow():
            time.sleep(0.02)
            return real()

        one.batcher.engine.step = slow
        job = Job(one.url, MODEL, [[5, 6, 7]], 10**6, 3, 60, rate, seconds=1.5)
        job = replace(job, bias={str(token): -100.0 for token in tiny_target.eos_ids})
        began = time.monotonic()
        answers = asyncio.run(run(job))
        assert time.monotonic() - began < 10
        assert one.idle()
        found = summary([asdict(answer) for answer in answers])
    assert found["errors"] == 0
    assert found["cut"] > 0
    assert found["tokens"] > 0


def test_errors_are_counted(tiny_target) -> None:
    with serving(tiny_target) as one:
        job = {"url": one.url, "model": "other", "prompts": [[1]], "requests": 2, "users": 1}
        done = subprocess.run(
            [sys.executable, "-m", "dspark_train.serving.load"],
            input=json.dumps({**job, "max_tokens": 3}),
            capture_output=True,
            text=True,
            check=True,
        )
    assert [one["error"] for one in json.loads(done.stdout)] == ["status 404"] * 2
