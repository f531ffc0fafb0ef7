"""Checkpoints that are damaged, missing, or for another target."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dspark_train.formats import load_drafter
from tests import tiny_language
from tests.tiny_pipeline import (
    STAGES,
    Run,
    changed_target,
    fingerprints,
    other_weights,
    refused,
)


@pytest.mark.parametrize("stage", ["generate", "bench"])
def test_a_checkpoint_for_another_target(
    tiny_run_finished: Run, tiny_target_folder: Path, tmp_path: Path, stage: str
) -> None:
    """Of the same sizes: only the fingerprint tells. And of other sizes: they are named."""
    run, checkpoint = tmp_path / "run", tmp_path / "run/export/checkpoint"
    same_size = changed_target(tiny_target_folder, tmp_path, other_weights)
    given = [f"stages=[{stage}]", f"checkpoint={checkpoint}", "prompt=please"]
    if stage == "generate":
        ended = tiny_run_finished(*given, f"generate.target={same_size}")
        refused(ended, "checkpoint was made with target", "other_target")
        tokenizer = tiny_language.build_tokenizer()
        smaller = tmp_path / "smaller"
        tiny_language.build_model(tokenizer, num_layers=4).save_pretrained(smaller)
        tokenizer.save_pretrained(smaller)
        ended = tiny_run_finished(*given, f"generate.target={smaller}")
        refused(ended, "does not fit target", "number of target layers 6 != 4")
    else:
        config = json.loads((checkpoint / "config.json").read_text())
        config["target"]["weights_sha"] = "0" * 64
        other = shutil.copytree(checkpoint, tmp_path / "other_checkpoint")
        (other / "config.json").write_text(json.dumps(config))
        ended = tiny_run_finished(*given, f"checkpoint={other}")
        refused(ended, "other_checkpoint was made with target", "weights 000000000000")
    assert fingerprints(run).keys() == set(STAGES)


def without_a_layer(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if "layers.0.mlp" not in k}, path / "model.safetensors"
    )


def set_config(key: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {key: value}))

    return change


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda path: shutil.rmtree(path), ["does not exist"]),
        (lambda path: (path / "config.json").unlink(), ["without a config.json"]),
        (lambda path: (path / "model.safetensors").unlink(), ["no file named model.safetensors"]),
        (lambda path: os.truncate(path / "model.safetensors", 5000), ["could not be loaded"]),
        (lambda path: os.truncate(path / "model.safetensors", 0), ["could not be loaded"]),
        (lambda path: os.truncate(path / "config.json", 40), ["could not be loaded"]),
        (set_config("model_type", "llama"), ["is not a drafter", "'llama'"]),
        (set_config("block_size", "seven"), ["could not be loaded"]),
        (set_config("mask_token_id", 10**6), ["mask_token_id=1000000"]),
        (set_config("markov_head_type", "gated"), ["do not fit its config.json", "missing"]),
        (set_config("intermediate_size", 64), ["do not fit its config.json", "mismatched"]),
        (without_a_layer, ["do not fit its config.json", "layers.0.mlp"]),
    ],
)
def test_damaged_checkpoints(
    tiny_run_finished: Run, tmp_path: Path, change: Callable[[Path], Any], parts: list[str]
) -> None:
    checkpoint = shutil.copytree(tmp_path / "run/export/checkpoint", tmp_path / "checkpoint")
    change(checkpoint)
    ended = tiny_run_finished("stages=[generate]", f"checkpoint={checkpoint}", "prompt=please")
    refused(ended, str(checkpoint), *parts)


def test_a_file_for_a_checkpoint(tiny_run_finished: Run, tmp_path: Path) -> None:
    file = tmp_path / "run/export/checkpoint/config.json"
    ended = tiny_run_finished("stages=[generate]", f"checkpoint={file}", "prompt=please")
    refused(ended, f"{file} is a file", "expected the folder")


def test_a_changed_byte_of_the_runs_own_checkpoint(tiny_run_finished: Run, tmp_path: Path) -> None:
    """Its tokens would still be right, only slower to come: nothing else would tell."""
    weights = tmp_path / "run/export/checkpoint/model.safetensors"
    spoilt = bytearray(weights.read_bytes())
    spoilt[-9] ^= 1
    weights.write_bytes(spoilt)
    ended = tiny_run_finished("stages=[generate]", "prompt=please")
    refused(ended, str(weights), "is damaged", "force=[export]")


def test_a_run_without_a_checkpoint(tiny_run: Run) -> None:
    refused(tiny_run("stages=[generate]", "prompt=please"), "export/checkpoint does not exist")


def test_weights_that_are_not_numbers_are_refused(finished_run: Path, tmp_path: Path) -> None:
    """A dead drafter decodes exactly, and nothing else would tell."""
    folder = shutil.copytree(finished_run / "export" / "checkpoint", tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.0.mlp.up_proj.weight holds NaN or infinity"):
        load_drafter(folder)
