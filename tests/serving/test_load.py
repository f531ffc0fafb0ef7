"""Times of answers by hand, and load on a real server from a second process."""

import json
import subprocess
import sys

import pytest

from dspark_train.serving.latency import summary
from tests.serving.served import MODEL, serving


def test_summary_by_hand() -> None:
    answers = [
        {"asked": 0.0, "tokens": [(1.0, 1), (2.0, 3), (4.0, 5)], "error": None},
        {"asked": 1.0, "tokens": [(1.5, 2), (2.5, 3)], "error": None},
        {"asked": 1.0, "tokens": [], "error": "status 500"},
    ]
    found = summary(answers)
    assert found["tokens"] == 8
    assert found["errors"] == 1
    assert found["throughput"] == pytest.approx(8 / 4)
    assert found["per_user"] == pytest.approx((4 / 3 + 1) / 2)
    assert found["first_p50"] == pytest.approx(0.75)
    # waits: .5 .5 (two tokens in one second), 1 1 (two in two), 1
    assert found["token_p50"] == pytest.approx(1.0)
    assert summary([answers[2]])["throughput"] == 0


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
    for one in answers:
        counts = [count for _, count in one["tokens"]]
        assert counts == sorted(counts)


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
