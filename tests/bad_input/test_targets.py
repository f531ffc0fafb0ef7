"""Targets that cannot be used, and training that goes wrong."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_train.artifacts import Artifact
from dspark_train.target import Target
from dspark_train.training.module import DrafterLoss
from tests.tiny_pipeline import Run, changed_target, fingerprints, refused


def test_a_target_that_ends_at_once(
    tiny_run: Run, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """All responses are empty: nothing but the end of the turn."""

    def end_at_once(target: Target) -> None:
        target.model.model.norm.weight.data.fill_(0.0)  # all logits are 0, and the first id wins
        target.model.generation_config.eos_token_id = [0, *target.eos_ids]

    path = changed_target(tiny_target_folder, tmp_path, end_at_once)
    ended = tiny_run(f"target.name={path}", "rollout.temperature=0")
    refused(ended, "responses of target", "are empty", "chat template")


def test_a_target_without_a_chat_template(
    tiny_run: Run, tiny_target_folder: Path, tmp_path: Path
) -> None:
    def forget(target: Target) -> None:
        target.tokenizer.chat_template = None

    path = changed_target(tiny_target_folder, tmp_path, forget)
    refused(tiny_run(f"target.name={path}"), "other_target has no chat template", "instruct")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("change", ["truncated", "missing"])
def test_a_damaged_target(
    tiny_run: Run, tiny_target_folder: Path, tmp_path: Path, file: str, change: str
) -> None:
    path = shutil.copytree(tiny_target_folder, tmp_path / "broken")
    if change == "missing":
        (path / file).unlink()
    else:
        (path / file).write_bytes((path / file).read_bytes()[:100])
    refused(tiny_run(f"target.name={path}"), str(path))


def test_a_target_that_overflows(
    tiny_run: Run, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the features is refused when they are captured, by document and position."""
    assert tiny_run("stages=[rollout]").status == 0
    forward = Target.forward

    def overflowing(self: Target, *args: Any, taps: Any = (), **more: Any) -> Any:
        output = forward(self, *args, taps=taps, **more)
        if taps:
            output.features[0, 2, 5] = float("nan")
        return output

    monkeypatch.setattr(Target, "forward", overflowing)
    ended = tiny_run("stages=[capture]")
    refused(ended, "features at position 2, column 5 is nan", "target.dtype=float32")


def test_a_trained_loss_that_is_not_finite(
    tiny_run_finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprints(tmp_path / "run")
    with monkeypatch.context() as patch:
        forward = DrafterLoss.forward

        def spoiled(self: DrafterLoss, batch: Any) -> Any:
            numerator, terms = forward(self, batch)
            numerator = numerator * float("nan")
            return numerator, replace(terms, numerator=numerator)

        patch.setattr(DrafterLoss, "forward", spoiled)
        ended = tiny_run_finished("stages=[train]", "force=[train]")
    refused(ended, "the loss of step 0 is nan", "lower train.lr")
    assert fingerprints(tmp_path / "run").keys() == before.keys() - {"train"}
    assert Artifact.open(tmp_path / "run" / "train.previous").fingerprint == before["train"]
