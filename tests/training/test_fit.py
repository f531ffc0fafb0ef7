"""Training: it learns, it resumes exactly, it stops on nonsense, it logs."""

import copy
import csv
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config, DrafterSettings, LoggerConfig, ObjectiveConfig, TrainConfig
from dspark_train.data.store import FeatureStore
from dspark_train.drafter import Drafter
from dspark_train.stages.train import drafter_config
from dspark_train.target import Target
from dspark_train.training import fit as fitting
from dspark_train.training import launch

TRAIN = TrainConfig(
    epochs=3,
    batch_documents=8,
    anchors=16,
    optimiser="adamw",
    lr=3e-3,
    precision="32-true",
    validation=0.1,
)
CSV_ONLY = LoggerConfig()
Fit = Callable[..., tuple[dict[str, Any], Drafter]]


@pytest.fixture(autouse=True)
def one_thread():
    """More threads add up in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fit(finished_run: Path, tiny_target: Target, tmp_path: Path) -> Fit:
    """`fit("folder", logger=…, epochs=2) -> (numbers, drafter)` on features of the tiny run.

    `fit.first` is the drafter that the last one began with.
    """
    capture = Artifact.open(finished_run / "capture")

    def run(
        folder: str,
        part: str = "all",
        logger: LoggerConfig = CSV_ONLY,
        objective: dict[str, float] | None = None,
        decode: Any = None,
        **train: Any,
    ) -> tuple[dict[str, Any], Drafter]:
        config = Config(
            name="test",
            train=replace(TRAIN, **train),
            drafter=DrafterSettings(num_hidden_layers=1, block_size=4, markov_rank=16),
            objective=ObjectiveConfig(**(objective or {})),
            logger=logger,
        )
        torch.manual_seed(0)
        drafter = Drafter(drafter_config(config, tiny_target, capture.facts))
        run.first = copy.deepcopy(drafter)
        trained, numbers = fitting.fit(
            config,
            drafter,
            tiny_target.head,
            FeatureStore(capture),
            part=part,
            epochs=config.train.epochs,
            lr=config.train.lr,
            writer=ArtifactWriter(tmp_path / folder, "train", {}, {}),
            device=torch.device("cpu"),
            decode=decode,
        )
        return numbers, trained

    return run


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "logs" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses(directory: Path) -> list[tuple[int, float]]:
    found = [(row["step"], row["train/loss"]) for row in rows(directory) if row["train/loss"]]
    return [(int(step), float(loss)) for step, loss in found]


class Stop(Callback):
    """Does something in the middle: after batch `number`."""

    def __init__(self, number: int, action: Callable[[], None]) -> None:
        self.number, self.action = number, action

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number == self.number:
            self.action()


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Let `action` happen in the next training."""
    make = launch.make_trainer

    def with_stop(ours: dict[str, Any], *more: Any) -> Any:
        return make(ours | {"callbacks": [*ours["callbacks"], Stop(number, action)]}, *more)

    monkeypatch.setattr(launch, "make_trainer", with_stop)


def same(one: Drafter, other: Drafter) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_training_lowers_the_loss(fit: Fit, tmp_path: Path) -> None:
    numbers, drafter = fit("a")
    first, last = losses(tmp_path / "a")[0][1], losses(tmp_path / "a")[-1][1]
    assert last < 0.8 * first
    assert numbers["steps"] == len(losses(tmp_path / "a"))
    assert numbers["metrics"]["validation/tau"] > 1.0
    assert not any(p.isnan().any() for p in drafter.parameters())


@pytest.mark.parametrize("part", ["backbone", "heads"])
def test_only_the_part_that_is_trained_moves(fit: Fit, part: str) -> None:
    _, drafter = fit("a", part=part, epochs=1)
    before = fit.first.state_dict()
    moved = {name for name, t in drafter.state_dict().items() if not torch.equal(t, before[name])}
    heads = {name for name in before if name.startswith(("markov_head", "confidence_head"))}
    assert moved
    assert moved <= heads if part == "heads" else not moved & heads


@pytest.mark.parametrize(
    ("batch", "train"),
    [
        (6, {}),
        (6, {"micro_documents": 4}),
        (6, {"workers": 2}),
        (4, {"micro_documents": 3, "row_tokens": 80, "ema": 0.9, "optimiser": "muon"}),
        (4, {}),  # the last before a validation
    ],
)
def test_interrupted_training_ends_with_the_same_weights(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, train: dict[str, Any]
) -> None:
    """Law 7. Ctrl-C comes at an odd batch, in the middle of accumulated gradients."""
    numbers, whole = fit("whole", **train)
    with monkeypatch.context() as patch:
        stop_at(patch, batch, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            fit("part", **train)
    done = losses(tmp_path / "part")[-1][0] + 1
    assert 0 < done < numbers["steps"]
    again, resumed = fit("part", **train)
    assert same(resumed, whole)
    assert again == numbers
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_in_the_last_step_changes_nothing(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, whole = fit("whole")
    with monkeypatch.context() as patch:
        last = numbers["steps"] - 1
        stop_at(patch, last, lambda: os.kill(os.getpid(), signal.SIGINT))
        again, ended = fit("part")
    assert same(ended, whole)
    assert again == numbers
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_a_killed_training_continues_from_the_last_checkpoint(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here an exception stops it after seven steps, and again three steps later."""
    _, whole = fit("whole")

    def fail() -> None:
        raise RuntimeError("killed")

    for number in (7, 3):
        with monkeypatch.context() as patch:
            stop_at(patch, number, fail)
            with pytest.raises(RuntimeError, match="killed"):
                fit("part", checkpoint_minutes=1e-9)
    _, resumed = fit("part")
    assert same(resumed, whole)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


def test_a_second_interrupt_stops_at_once(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    stop_at(monkeypatch, 4, twice)
    with pytest.raises(KeyboardInterrupt):
        fit("a")
    assert len(losses(tmp_path / "a")) == 4
    assert not list((tmp_path / "a" / "scratch").glob("*.ckpt"))


def test_a_loss_that_is_not_finite_stops_with_its_step(
    fit: Fit, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_target.head
    calls = []

    def broken(ids: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return type(head).embed(head, ids) * (float("nan") if len(calls) > 3 else 1.0)

    monkeypatch.setattr(head, "embed", broken)
    with pytest.raises(ValueError, match=r"the loss of step 3 is nan.*lower train\.lr"):
        fit("a")


def test_what_lightning_refuses_is_named(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.trainer=\{'foo': 1\}.*foo"):
        fit("a", trainer={"foo": 1})
    with pytest.raises(ValueError, match=r"train\.precision=99"):
        fit("a", precision="99")
    assert not (tmp_path / "a").exists()


def test_trainer_settings_reach_lightning(fit: Fit) -> None:
    numbers, _ = fit("a", trainer={"max_steps": 2})
    assert numbers["steps"] == 2


def test_tensorboard(fit: Fit, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fit("a", logger=LoggerConfig(tensorboard=True), epochs=1)
    assert list((tmp_path / "a" / "tensorboard").glob("events.out.tfevents.*"))
    assert losses(tmp_path / "a")


@pytest.mark.slow
def test_wandb_offline_never_asks(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for folder in ("a", "b"):  # two stages are two runs
        fit(folder, logger=LoggerConfig(wandb="offline"), epochs=1)
        assert len(list((tmp_path / folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert "login" not in "".join(capfd.readouterr())


def test_wandb_online_without_a_login_is_refused(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"logger\.wandb=online needs a login"):
        fit("a", logger=LoggerConfig(wandb="online"))
