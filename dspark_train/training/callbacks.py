"""What happens beside the steps: one progress bar, and checkpoints that resume exactly."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from tqdm import tqdm

from dspark_train.disk import commit, full_disk_explained


class ProgressBar(Callback):
    """A bar like those of the other stages, with the last loss and the expected τ."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bar: tqdm | None = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.bar = tqdm(
            total=trainer.num_training_batches,
            initial=trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            desc=self.name,
            unit="batch",
            mininterval=1,
            disable=not trainer.is_global_zero,
        )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        shown = {"train/loss": "loss", "validation/tau": "τ"}
        values = trainer.callback_metrics
        self.bar.set_postfix(
            {short: f"{values[key]:.3f}" for key, short in shown.items() if key in values},
            refresh=False,
        )
        self.bar.update()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.bar.close()

    def on_exception(self, trainer: Trainer, module: LightningModule, _: BaseException) -> None:
        if self.bar is not None:
            self.bar.close()


class Checkpoints(Callback):
    """Saves the training between two optimiser steps: now and then, and when asked to stop.

    A checkpoint in the middle of a step would resume to other weights: gradients that were
    accumulated so far are in no checkpoint. So Ctrl-C and SIGTERM let the step finish, save, and
    then stop; a second Ctrl-C stops at once, and the last checkpoint counts.

    Args:
        path: of the one checkpoint that is kept.
        minutes: from one to the next.
    """

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.seconds = path, 60 * minutes
        self.asked = self._stop = False
        self._saved = time.monotonic()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the context Ctrl-C means: save and stop. Only the main thread can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        tqdm.write("stopping after this step; Ctrl-C again stops at once")

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, number: int
    ) -> None:
        stop = self.asked or trainer.received_sigterm
        due = stop or time.monotonic() - self._saved > self.seconds
        last = number + 1 == trainer.num_training_batches
        stepped = (number + 1) % trainer.accumulate_grad_batches == 0 or last
        if not stepped or not trainer.strategy.reduce_boolean_decision(due, all=False):
            return
        self._saved = time.monotonic()
        self.save(trainer)
        self._stop = trainer.strategy.reduce_boolean_decision(stop, all=False)

    def _leave(self, *_: Any) -> None:
        if self._stop:
            raise KeyboardInterrupt

    # the first of these to come, once the step is in the logs too
    on_train_batch_start = on_validation_start = on_train_end = _leave

    def save(self, trainer: Trainer) -> None:
        """Replace the checkpoint by one of now."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with full_disk_explained(self.path):
            trainer.save_checkpoint(temporary)
            if trainer.is_global_zero:
                commit(temporary, self.path)
