"""What a capture would take, and whether what is there is still true."""

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dspark_train.artifacts import Artifact
from dspark_train.data.store import FeatureStore
from dspark_train.disk import LOCK, sha256_file
from tests.tiny_pipeline import Run, refused, rewrite_manifest


def test_the_plan_is_what_the_capture_takes(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run("stages=[rollout]").status == 0
    before = sorted(tmp_path.rglob("*"))
    given = ("capture.num_taps=3", "capture.dtype=fp8")
    planned = tiny_run("stages=[capture]", "capture.plan=true", *given)
    assert planned.status == 0, planned
    assert sorted(tmp_path.rglob("*")) == before
    assert tiny_run("stages=[capture]", *given).status == 0
    capture = Artifact.open(tmp_path / "run" / "capture")
    documents, tokens = capture.counts["documents"], capture.counts["tokens"]
    assert f"{documents:,} documents, {tokens:,} tokens" in planned.out
    said = re.search(r"fp8, taps \[1, 2, 3\]: ([\d,]+) bytes a token, ([\d.]+) MB", planned.out)
    header = 4000 + 16 * documents  # of the file: splits, identities
    assert 0 <= capture.facts["bytes_per_token"] - int(said[1].replace(",", "")) < header / tokens
    assert abs(capture.counts["bytes"] / 1e6 - float(said[2])) < (header + 80 * documents) / 1e6
    for name in ("float32", "bfloat16", "fp8", "int8", "online", "3 taps", "1 taps", "tokens/s"):
        assert name in planned.out


def test_a_plan_without_rollouts(tiny_run: Run) -> None:
    refused(tiny_run("stages=[capture]", "capture.plan=true"), "run/rollout", "must run first")


def test_what_is_well_is_said_to_be(tiny_run_finished: Run) -> None:
    ended = tiny_run_finished("stages=[verify]")
    assert ended.status == 0, ended
    assert ended.out.count("as written") == 6  # the stages of the schedule "joint"
    assert "documents by a fresh pass: relative error at most" in ended.out


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int8"])
def test_rounding_is_no_damage(tiny_run_finished: Run, dtype: str) -> None:
    ended = tiny_run_finished("stages=[capture,verify]", f"capture.dtype={dtype}")
    assert ended.status == 0, ended
    error = float(re.search(r"error at most ([\d.e-]+)", ended.out)[1])
    assert 1e-4 < error < 0.05


def test_one_bit_in_each_kind_of_file_is_found_and_named(
    tiny_run_finished: Run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kinds = [p for p in sorted(run.rglob("*")) if p.is_file() and p.name != LOCK]
    assert {path.suffix for path in kinds} >= {".json", ".jsonl", ".safetensors", ".csv", ".png"}
    for path in kinds:
        whole = path.read_bytes()
        spoilt = bytearray(whole)
        spoilt[2 * len(whole) // 3] ^= 1
        path.write_bytes(spoilt)
        refused(tiny_run_finished("stages=[verify]"), str(path.relative_to(tmp_path)))
        path.write_bytes(whole)
    assert tiny_run_finished("stages=[verify]").status == 0


def test_everything_that_is_damaged_is_named(tiny_run_finished: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    damaged = [run / "rollout" / "prompts.jsonl", run / "train" / "logs" / "metrics.csv"]
    for path in damaged:
        path.write_bytes(path.read_bytes()[::-1])
    (run / "export" / "manifest.json").write_text("{")
    ended = tiny_run_finished("stages=[verify]")
    assert ended.status == 1
    for path in (*damaged, run / "export" / "manifest.json"):
        assert f"{path} is damaged" in ended.err
    assert "capture" in ended.out  # which is whole, and is said to be


def every_digit(text: str) -> list[int]:
    return [place for place, letter in enumerate(text) if letter.isdigit()]


def test_no_bit_of_a_manifest_goes_unnoticed(finished_run: Path, tmp_path: Path) -> None:
    """A count of 12 that becomes 13 is still JSON: the manifest's own checksum finds it."""
    folder = tmp_path / "rollout"
    folder.mkdir()
    for path in (finished_run / "rollout").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    for place in every_digit(text)[::7]:
        manifest.write_text(text[:place] + str(int(text[place]) ^ 1) + text[place + 1 :])
        with pytest.raises(ValueError, match=r"manifest\.json"):
            Artifact.open(folder)


def test_checksums_of_wrong_contents_do_not_help(tiny_run_finished: Run, tmp_path: Path) -> None:
    """Files that are whole, with the right checksums, and wrong: tokens, features, layers."""
    capture = tmp_path / "run" / "capture"
    shard = capture / "features-00000.safetensors"
    with safe_open(shard, "pt") as file:
        right = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    width = right["features"].shape[1] // 2
    changes = {
        "has other tokens": {"input_ids": right["input_ids"].roll(1)},
        "features of tap 0": {"features": right["features"].roll(1, 0)},
        "features of tap 1": {
            "features": torch.cat([right["features"][:, :width]] * 2, dim=1).contiguous()
        },
        "last hidden states": {"last_hidden": right["last_hidden"] * 1.3},
        "NaN": {"features": right["features"].clone().fill_(float("nan"))},
    }
    for message, change in changes.items():
        save_file(right | change, shard, metadata=metadata)
        rewrite_manifest(capture, shard.name)
        refused(tiny_run_finished("stages=[verify]"), "features-00000", message)
    save_file(right, shard, metadata=metadata)
    rewrite_manifest(capture, shard.name)
    assert tiny_run_finished("stages=[verify]").status == 0
    assert len(FeatureStore(Artifact.open(capture))) == Artifact.open(capture).counts["documents"]
    assert sha256_file(shard) == Artifact.open(capture).files[shard.name][1]
