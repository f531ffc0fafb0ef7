"""Scripts that measure: they end, and say what they are asked for (the sizes here are tiny)."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.data.encoding import STORED
from dspark_train.data.store import FeatureStore
from scripts import batch_speed, capture_speed, policy_speed, store_errors
from tests.tiny_pipeline import Run


def test_tau_by_dtype(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every dtype is trained on; the widest row is the run's own training, to the last digit."""
    store_errors.main([str(finished_run), "--train"])
    said = capsys.readouterr().out
    rows = dict(re.findall(r"^(\w+) +[\d,]+ +([\d.]+) +[+-]", said, re.MULTILINE))
    assert list(rows) == list(STORED)
    tau = Artifact.open(finished_run / "train").counts["metrics"]["validation/tau"]
    assert rows["float32"] == f"{tau:.4f}"


def test_rounded_is_what_a_store_of_that_dtype_gives(
    tiny_run_finished: Run, finished_run: Path, tmp_path: Path
) -> None:
    assert tiny_run_finished("stages=[capture]", "capture.dtype=fp8").status == 0
    stored = FeatureStore(Artifact.open(tmp_path / "run" / "capture"))
    capture = Artifact.open(finished_run / "capture")
    exact = FeatureStore(capture)
    rounded = store_errors.Rounded(capture, "fp8", exact=[3])
    for number in range(len(stored)):
        expected = (exact if number == 3 else stored).document(number)
        for field in fields(expected):
            found = getattr(rounded.documents([number])[0], field.name)
            assert torch.equal(found, getattr(expected, field.name)), (number, field.name)


def test_errors_by_dtype(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_errors.main([str(finished_run), "--documents", "3", "--taps", "2"])
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[2:]] == list(STORED)


def test_rollouts_against_transformers(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--batch", "4", "--tokens", "5", "--threads", "1", "--minutes", "0.001")
    batch_speed.main([str(finished_run), *sizes])
    said = capsys.readouterr().out
    assert re.search(r"^full +round 1: transformers +20 tokens", said, re.MULTILINE)
    last = said.splitlines()[-2:]
    for line, start in zip(
        last, ("full   4 prompts: ours", "ended  12 prompts: ours"), strict=True
    ):
        assert line.startswith(start), said
        assert "times (medians of 1)" in line


def test_capture_against_a_bare_forward(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--batches", "3", "--batch-tokens", "128", "--taps", "2", "--threads", "1")
    capture_speed.main([str(finished_run), *sizes])
    said = capsys.readouterr().out
    assert ", 3 batches, " in said
    found = re.findall(r"^(\w+) +[\d,]+ tokens/s +([\d.]+) % of bare", said, re.MULTILINE)
    assert [name for name, _ in found] == ["bare", "taps", "capture"]
    assert found[0][1] == "100.0"


def test_policies_in_one_engine(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("fixed:0", "fixed:2", "auto:static", "auto")
    sizes = ("--requests", "1", "3", "--tokens", "8", "--minutes", "0.001", "--threads", "1")
    policy_speed.main([str(finished_run), *sizes, "--policies", *policies])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-8:]]
    assert [tuple(line[:2]) for line in lines] == [(n, p) for n in "13" for p in policies]
    plain, two = lines[0], lines[1]
    assert (plain[4], plain[5]) == ("0.00", "1.00")
    assert 0 < float(two[4]) <= 2
    assert all(float(line[2]) > 0 for line in lines)
