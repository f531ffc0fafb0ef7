"""What happens between the steps: logs, validation, checkpoints, and stopping when asked to."""

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from dspark_train import ranks
from dspark_train.data.datamodule import FeatureData
from dspark_train.training import checkpoint
from dspark_train.training.checks import fingerprints
from dspark_train.training.module import DrafterTraining
from dspark_train.training.validation import Validation

# steps after which every weight must have moved
MOTION_STEPS = 100


class ProgressBar(Callback):
    """A bar like those of the other stages, with the last loss and the expected τ."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total = name, total
        self.bar: tqdm | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.bar = tqdm(
            total=self.total,
            initial=module.start,
            desc=self.name,
            unit="step",
            mininterval=1,
            disable=not ranks.first(),
        )

    def show(self, numbers: dict[str, float]) -> None:
        shown = {"train/loss": "loss", "validation/tau": "τ"}
        self.bar.set_postfix(
            {short: f"{numbers[key]:.3f}" for key, short in shown.items() if key in numbers},
            refresh=False,
        )
        self.bar.update()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.bar.close()

    def on_exception(self, trainer: Trainer, module: LightningModule, _: BaseException) -> None:
        if self.bar is not None:
            self.bar.close()


class Between(Callback):
    """Does what comes between two optimiser steps, in this order: log, validate, save, stop.

    A checkpoint in the middle of a step would resume to other weights: gradients that were
    accumulated so far are in no checkpoint. So Ctrl-C and SIGTERM let the step finish, save, and
    then stop; a second one stops at once, and the last checkpoint counts.

    Args:
        path: of the checkpoint to continue from.
        minutes: from one checkpoint to the next.
        data: what is trained on.
        validation: what is done every so many steps, and after the last.
        bar: that shows the numbers.
    """

    def __init__(
        self,
        path: Path,
        minutes: float,
        data: FeatureData,
        validation: Validation,
        bar: ProgressBar,
    ) -> None:
        self.path, self.seconds = path, 60 * minutes
        self.data, self.validation, self.bar = data, validation, bar
        self.asked = False
        self.numbers: dict[str, float] = {}
        self.state: checkpoint.State | None = None
        self._initial: dict[str, list[float]] = {}
        self._saved = self._stepped = time.monotonic()

    def ask(self) -> tuple[bool, bool]:
        """Whether this process was asked to stop, and whether a checkpoint is due."""
        return self.asked, ranks.first() and time.monotonic() - self._saved > self.seconds

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context Ctrl-C means: save and stop. Only the main thread can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("stopping after this step; once more stops at once")

    def on_train_start(self, trainer: Trainer, module: DrafterTraining) -> None:
        if threading.current_thread() is threading.main_thread():
            # Lightning's handler talks to other processes in the middle of whatever they do
            signal.signal(signal.SIGTERM, self._ask)
        if self.state is None:
            self._initial = fingerprints(module.loss.drafter)
        else:
            checkpoint.restore(self.state, module, self.path.parent.parent.name)
            progress, self.state = self.state["progress"], None
            self._initial, self.numbers = progress["initial"], progress["numbers"]
            self.validation.best, module.checks.taught = progress["best"], progress["taught"]
        self._saved = self._stepped = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, module: DrafterTraining, outputs: Any, batch: Any, number: int
    ) -> None:
        if (number + 1) % trainer.accumulate_grad_batches:
            return
        step, total = module.step, self.data.steps
        self.record(trainer, step - 1, self._described(step, module.numbers))
        if step == min(MOTION_STEPS, total):
            module.checks.require_motion(module.loss.drafter, self._initial, step)
        if self.validation.due(step):
            self.record(trainer, step - 1, self.validation.run(module))
        self.bar.show(self.numbers)
        asked, due = module.raised
        if (asked or due) and step < total:
            self.save(module)
        if asked and step < total:
            raise KeyboardInterrupt

    def save(self, module: DrafterTraining) -> None:
        """Replace the checkpoint by one of now."""
        progress = {
            "step": module.step,
            "best": self.validation.best,
            "numbers": self.numbers,
            "initial": self._initial,
            "taught": module.checks.taught,
        }
        for logger in module.trainer.loggers:
            logger.save()  # a killed run has logged what its checkpoint has done
        checkpoint.save(self.path, module, progress)
        self._saved = time.monotonic()

    def record(self, trainer: Trainer, step: int, numbers: dict[str, float]) -> None:
        """Give numbers to all loggers; the last ones are kept, those of the machine apart."""
        self.numbers |= {k: v for k, v in numbers.items() if not k.startswith("machine/")}
        if ranks.first():
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)

    def _described(self, step: int, numbers: dict[str, float]) -> dict[str, float]:
        """Numbers of a step, with what they are per document and what the machine did."""
        now, before = time.monotonic(), self._stepped
        self._stepped = now
        documents = self.data.schedule[step - 1][1]
        counts = {
            f"train/{name}_per_document": numbers[f"train/{name}"] / len(documents)
            for name in ("anchors", "supervised")
        }
        tokens = sum(self.data.store.lengths[n] for n in documents)
        return (
            numbers
            | counts
            | {
                "machine/tokens_per_second": tokens / max(now - before, 1e-9),
                "machine/peak_gb": peak_bytes() / 1e9,
            }
        )


def peak_bytes() -> int:
    """Most memory that was in use so far: of the GPU where there is one, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
