"""Online features on two processes: those of a store, whether the target is whole or shared out."""

import csv
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dspark_train import ranks
from dspark_train.__main__ import main
from dspark_train.config import CaptureConfig, Config, TrainConfig
from dspark_train.target import Target
from dspark_train.target.sharding import shard
from dspark_train.validation import validate
from tests.processes import forked
from tests.tiny_pipeline import arguments

MODES = ("offline", "replicated", "fsdp2")
# 3 documents on 2 processes, each with a pass of its own: one process has 2 passes, one has 1
TRAIN = (
    "stages=[capture,train]",
    "target.pack=false",
    "capture.batch_tokens=1",
    "train.epochs=1",
    "train.batch_documents=3",
    "train.validation=0.1",
)


def sharded_as_whole(folder: Path) -> None:
    """One rank: a target computes the same once it holds half of its layers only."""
    target = Target.load(str(folder), dtype="float32", pack=False)
    ids = torch.arange(3, 15 + 5 * ranks.rank())[None]
    whole = target.forward(ids, taps=(1, 3))
    size = sum(p.numel() for p in target.layers.parameters())
    logits = target.head.logits(whole.last_hidden)
    shard(target)
    for _ in range(2):
        parts = target.forward(ids, taps=(1, 3))
        assert torch.equal(parts.features, whole.features)
        assert torch.equal(target.head.logits(parts.last_hidden), logits)
        held = sum(p.to_local().numel() for p in target.layers.parameters())
        assert held <= 0.51 * size, (held, size)


def losses(run: Path) -> list[str]:
    with (run / "train" / "logs" / "metrics.csv").open(newline="") as file:
        return [row["train/loss"] or row["validation/loss"] for row in csv.DictReader(file)]


def test_two_processes_train_online_as_from_a_store(
    finished_run: Path, tiny_target_folder: Path, tiny_prompts: Path, tmp_path: Path
) -> None:
    """Losses and weights to the last bit; a sharded target computes what a whole one does."""
    runs = []
    for mode in MODES:
        shutil.copytree(finished_run / "rollout", tmp_path / mode / "rollout")
        given = ["capture=offline"]
        if mode != "offline":
            given = ["capture=online", f"capture.target_sharding={mode}"]
        runs.append(arguments(tiny_target_folder, tiny_prompts, tmp_path / mode, *TRAIN, *given))

    def work() -> None:
        sharded_as_whole(tiny_target_folder)
        for given in runs:
            sys.argv = ["dspark_train", *given]
            main()

    forked(work, 2, tmp_path)
    stored, *computed = (tmp_path / mode for mode in MODES)
    assert len(losses(stored)) > 5
    weights = "train/drafter/model.safetensors"
    for run in computed:
        assert not list((run / "capture").glob("*.safetensors"))
        assert losses(run) == losses(stored), run
        assert (run / weights).read_bytes() == (stored / weights).read_bytes(), run


def test_what_cannot_be_shared_out_is_refused(tiny_target: Target) -> None:
    with pytest.raises(ValueError, match="there is one: start several by torchrun"):
        shard(tiny_target)
    capture = CaptureConfig(target_sharding="fsdp2")
    with pytest.raises(ValueError, match=r"train\.decode_validation=2: expected 0 where"):
        validate(Config(capture=capture, train=TrainConfig(decode_validation=2)))
    with pytest.raises(ValueError, match="target_sharding=zero: expected one of"):
        validate(Config(capture=CaptureConfig(target_sharding="zero")))
    assert torch.equal(*(tiny_target.forward(torch.tensor([[5, 6]])).last_hidden for _ in "ab"))
