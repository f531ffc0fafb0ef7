"""Settings that are wrong, refused by a stage, or contradict what is there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_pipeline import (
    Run,
    fingerprints,
    refused,
)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.speed=1", ["train.speed", "train has no key speed"]),
        ("speed=1", ["'speed'"]),
        ("+speed=1", ["speed=1", "Key 'speed' not in 'Config'"]),
        ("speed", ["'speed'"]),
        ("train.lr=[", ["'['"]),
        ("target=gpt5", ["target/gpt5", "qwen3_4b"]),
        ("experiment=none_such", ["experiment/none_such", "quickstart"]),
        ("train.lr=fast", ["train.lr=fast", "Float"]),
        ("stages=[rollout,fly]", ["['fly'] unknown", "'capture'"]),
        ("force=[fly]", ["force=", "['fly'] unknown"]),
        ("stages=train", ["stages=train: expected a list, like stages=[train]"]),
        ("train.betas=0.9", ["train.betas=0.9: expected a list, like train.betas=[0.9]"]),
        ("stages=[]", ["stages=[] asks for nothing"]),
        ("target.device=cuda:99", ["target.device=cuda:99", "take auto, cpu"]),
        ("target.device=abacus", ["target.device=abacus", "take auto, cpu"]),
        ("target.name=/not/here", ["'/not/here' does not exist"]),
        ("target.name=package:not-a-package", ["'not-a-package' is not installed"]),
        ("target.attn_implementation=magic", ["magic"]),
        ("drafter.window_from=anchor", ["drafter.window_from=anchor", "no layer slides"]),
        ("drafter.causal_blocks=sliding", ["drafter.causal_blocks=sliding", "no layer slides"]),
        ("drafter.attention_scale=-1", ["drafter.attention_scale=-1", "a positive number"]),
        ("serve.policy=best", ["serve.policy=best", "fixed:LENGTH"]),
        ("bench_serving.policies=[auto,best]", ["bench_serving.policies=", "fixed:LENGTH"]),
        ("bench_serving.policies=[auto,auto]", ["bench_serving.policies=", "each once"]),
        ("simulate.policies=[prefix:3]", ["simulate.policies=", "fixed:LENGTH"]),
        ("generate.tree_nodes=100000", ["generate.tree_nodes=100000", "to 1024"]),
        ("generate.tree_branches=0", ["generate.tree_branches=0", "from 1 to"]),
        ("certify.vocabulary=1", ["certify.vocabulary=1", "at least 2 tokens"]),
    ],
)
def test_wrong_settings(tiny_run: Run, tmp_path: Path, override: str, parts: list[str]) -> None:
    refused(tiny_run(override), *parts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("stage", "override", "parts"),
    [
        ("capture", "capture.taps=[5]", ["[5]", "0 … 4", "last layer"]),
        ("capture", "capture.taps=[1,9]", ["[9]", "0 … 4"]),
        ("capture", "capture.num_taps=9", ["9 different taps do not fit", "6 layers"]),
        ("capture", "capture.max_length=5", ["too_long", "capture.max_length=5"]),
        ("train", "drafter.mask_token_id=999", ["mask_token_id=999", "128 tokens"]),
        ("train", "drafter.num_key_value_heads=3", ["num_key_value_heads=3", "num_attention"]),
        ("train", "train.precision=7", ["train.precision=7"]),
        ("train", "+train.trainer.colour=red", ["train.trainer", "colour"]),
        ("bench", "target.name=/not/here", ["'/not/here'"]),
    ],
)
def test_settings_that_a_stage_refuses_leave_its_artifact(
    tiny_run_finished: Run, tmp_path: Path, stage: str, override: str, parts: list[str]
) -> None:
    before = fingerprints(tmp_path / "run")
    refused(tiny_run_finished(f"stages=[{stage}]", override), *parts)
    assert fingerprints(tmp_path / "run") == before
    again = tiny_run_finished(f"stages=[{stage}]")
    assert again.status == 0
    assert "finished before" in again.out


def test_settings_that_contradict_an_artifact_name_both_sides(tiny_run_finished: Run) -> None:
    ended = tiny_run_finished("stages=[bench]", "drafter.block_size=9")
    refused(ended, "drafter.block_size=9 contradicts", "run/train", "drafter.block_size=4")
    ended = tiny_run_finished("stages=[calibrate]", "capture.taps=[2]")
    refused(ended, "capture.taps=[2] contradicts", "run/capture", "capture.taps=None")


def test_settings_that_contradict_a_checkpoint_name_both_sides(
    tiny_run_finished: Run, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(tmp_path / "run/export/checkpoint", tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "run")
    for stage in ("generate", "bench"):
        ended = tiny_run_finished(
            f"stages=[{stage}]", f"checkpoint={checkpoint}", "drafter.block_size=9", "prompt=hi"
        )
        refused(ended, "drafter.block_size=9 contradicts", "drafter.block_size=4")


def test_old_settings_bring_back_what_they_gave(tiny_run_finished: Run, tmp_path: Path) -> None:
    before = fingerprints(tmp_path / "run")
    assert tiny_run_finished("stages=[calibrate]", "calibrate.prompts=2").status == 0
    assert fingerprints(tmp_path / "run") != before
    ended = tiny_run_finished("stages=[calibrate]")
    assert "finished before" in ended.out
    assert fingerprints(tmp_path / "run") == before


@pytest.mark.parametrize("override", ["train.speed=1", "speed", "train.lr=fast", "target=gpt5"])
def test_the_command_ends_like_the_function(override: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dspark_train", override, f"run_dir={tmp_path}/run"],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert len(ended.stderr.strip().splitlines()) <= 2
    assert not ended.stdout


def test_a_folder_that_cannot_be_written(tiny_run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(tiny_run(f"run_dir={tmp_path / 'file' / 'run'}"), str(tmp_path / "file"))


def test_an_unknown_key_brings_the_near_ones(tiny_run: Run) -> None:
    refused(tiny_run("train.learning_rat=1"), "train has no key learning_rat", "'lr_parts'")


def test_text_with_signs_of_the_grammar_says_how_to_quote(tiny_run: Run) -> None:
    refused(tiny_run("prompt=Why, is it = so?"), "in prompt=Why", "quotes inside quotes", lines=4)


def test_parts_of_the_prompts_that_will_be_missed_are_missed_at_once(
    tiny_run: Run, tmp_path: Path
) -> None:
    ended = tiny_run("prompts.held_out=0")
    refused(ended, "no held_out prompts", "export and bench", "prompts.held_out=0")
    assert not (tmp_path / "run" / "rollout" / "manifest.json").exists()
    assert tiny_run("prompts.held_out=0", "stages=[rollout]").status == 0
