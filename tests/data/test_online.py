"""Online features are those of a store: same batches, anchors and losses."""

import csv
import shutil
import threading
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.config import CaptureConfig, Config, TrainConfig
from dspark_train.data.ahead import one_ahead
from dspark_train.data.datamodule import FeatureData
from dspark_train.data.store import FeatureStore
from dspark_train.stages import features as stage_features
from dspark_train.stages.features import open_features
from dspark_train.target import Target
from tests.tiny_pipeline import Run

STEPS = ("train.epochs=1", "train.batch_documents=3", "train.validation=0.1", "schedule=joint")


def losses(run: Path) -> list[str]:
    with (run / "train" / "logs" / "metrics.csv").open(newline="") as file:
        return [row["train/loss"] or row["validation/loss"] for row in csv.DictReader(file)]


@pytest.fixture
def both(tiny_run_finished: Run, tmp_path: Path) -> tuple[Path, Path]:
    """Folders of a run that trained from a store, and of one that did not."""
    folders = tmp_path / "offline", tmp_path / "online"
    for folder in folders:
        ended = tiny_run_finished(
            "stages=[capture,train]", f"capture={folder.name}", "capture.batch_tokens=1", *STEPS
        )
        assert ended.status == 0, ended
        shutil.copytree(tmp_path / "run", folder)
    return folders


def test_online_training_is_offline_training(both: tuple[Path, Path], tiny_target: Target) -> None:
    """Nothing is stored, and every batch, loss and weight agrees to the last bit."""
    offline, online = both
    assert not list((online / "capture").glob("*.safetensors"))
    assert Artifact.open(online / "capture").counts["bytes"] == 0
    assert len(losses(offline)) > 5
    assert losses(offline) == losses(online)
    weights = "train/drafter/model.safetensors"
    assert (offline / weights).read_bytes() == (online / weights).read_bytes()

    config = Config(
        run_dir=str(online), capture=CaptureConfig(num_taps=2), train=TrainConfig(batch_documents=3)
    )
    computed = open_features(config, Artifact.open(online / "capture"), tiny_target)
    stored = FeatureStore(Artifact.open(offline / "capture"))
    assert computed.identities == stored.identities
    assert computed.lengths == stored.lengths
    pairs = zip(
        *(FeatureData(f, config.train, 1).train_dataloader() for f in (computed, stored)),
        strict=True,
    )
    for one, other in pairs:
        for field in fields(one):
            assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int8"])
def test_what_is_computed_is_rounded_like_what_is_stored(
    tiny_run_finished: Run, tmp_path: Path, tiny_target: Target, dtype: str
) -> None:
    kept = {}
    for mode in ("offline", "online"):
        given = (f"capture={mode}", f"capture.dtype={dtype}", "capture.batch_tokens=1")
        assert tiny_run_finished("stages=[capture]", *given).status == 0
        config = Config(run_dir=str(tmp_path / "run"))
        opened = open_features(config, Artifact.open(tmp_path / "run" / "capture"), tiny_target)
        kept[mode] = [opened.document(n) for n in range(len(opened))]
    for one, other in zip(kept["offline"], kept["online"], strict=True):
        for field in fields(one):
            assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_documents_that_share_a_pass_agree_up_to_rounding(
    tiny_run_finished: Run, tmp_path: Path, tiny_target: Target, finished_run: Path
) -> None:
    stored = FeatureStore(Artifact.open(finished_run / "capture"))
    assert tiny_run_finished("stages=[capture]", "capture=online").status == 0
    capture = Artifact.open(tmp_path / "run" / "capture")
    computed = open_features(Config(run_dir=str(tmp_path / "run")), capture, tiny_target)
    numbers = [5, 0, 17, 3]
    for one, number in zip(computed.documents(numbers), numbers, strict=True):
        other = stored.document(number)
        assert torch.equal(one.input_ids, other.input_ids)
        torch.testing.assert_close(one.features, other.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.last_hidden, other.last_hidden, rtol=1e-4, atol=1e-4)


def test_other_rollouts_are_refused(
    tiny_run_finished: Run, tmp_path: Path, tiny_target: Target
) -> None:
    assert tiny_run_finished("stages=[capture]", "capture=online").status == 0
    assert tiny_run_finished("stages=[rollout]", "rollout.seed=1").status == 0
    capture = Artifact.open(tmp_path / "run" / "capture")
    with pytest.raises(ValueError, match=r"is not what .* was made of"):
        open_features(Config(run_dir=str(tmp_path / "run")), capture, tiny_target)


def test_a_device_of_its_own(
    tiny_run_finished: Run, tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`capture.device` loads a second target there; the trained-with one stays where it is."""
    assert tiny_run_finished("stages=[capture]", "capture=online").status == 0
    run, asked = tmp_path / "run", []

    def load(config: Config) -> Target:
        asked.append(config.target.device)
        return tiny_target

    monkeypatch.setattr(stage_features, "load_target", load)
    for device in (None, "cpu", "meta"):
        capture = CaptureConfig(device=device)
        config = Config(run_dir=str(run), capture=capture)
        open_features(config, Artifact.open(run / "capture"), tiny_target)
    assert asked == ["meta"]


def test_one_batch_ahead_and_not_two() -> None:
    made: list[int] = []

    def items():
        for number in range(5):
            made.append(number)
            yield number

    for number in one_ahead(items()):
        time.sleep(0.02)
        assert made == list(range(min(number + 2, 5)))
    assert made == [0, 1, 2, 3, 4]


def test_what_goes_wrong_ahead_is_raised_in_its_place() -> None:
    def items():
        yield threading.current_thread()
        raise ValueError("the target overflows")

    ahead = one_ahead(items())
    assert next(ahead) is not threading.current_thread()
    with pytest.raises(ValueError, match="overflows"):
        next(ahead)
