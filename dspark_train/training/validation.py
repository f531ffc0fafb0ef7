"""Validation: expected accepted length on held-out documents, real decoding, and the best weights.

"Best" is the longest accepted length, never the loss: by real decoding where that is switched on,
else by its expectation over the rollouts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspark_train import ranks
from dspark_train.data.datamodule import FeatureData
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.stats import DecodingStats
from dspark_train.drafter import Drafter
from dspark_train.target import Target
from dspark_train.training import checkpoint
from dspark_train.training.module import DrafterTraining

EXPECTED, DECODED = "validation/tau", "validation/decoded_tau"


class Validation:
    """Measures the weights that count, and keeps the best of them in a file.

    Args:
        data: its validation documents are used.
        every: optimiser steps from one to the next; one more follows the last step.
        path: of the best weights.
        decode: gives the mean number of committed tokens a round of a drafter; None: no decoding.

    Attributes:
        best: `step`, `tau` and `numbers` of the weights in the file; empty without any.
    """

    def __init__(
        self,
        data: FeatureData,
        every: int,
        path: Path,
        decode: Callable[[Drafter], float] | None = None,
    ) -> None:
        self.data, self.every, self.path, self.decode = data, every, path, decode
        self.best: dict[str, Any] = {}

    def due(self, step: int) -> bool:
        """Whether validation follows after that many steps."""
        last = step == self.data.steps
        return bool(self.data.validation or self.decode) and (step % self.every == 0 or last)

    def run(self, module: DrafterTraining) -> dict[str, float]:
        """Numbers of the weights as they are; the file is replaced if they are the best so far."""
        numbers = self._expected(module)
        weights = checkpoint.current_weights(module)
        if self.decode is not None:
            tau = None
            if ranks.first():
                config = module.loss.drafter.config
                with torch.random.fork_rng():
                    drafter = Drafter(config)
                drafter.load_state_dict(weights)
                tau = self.decode(drafter.eval())
            numbers[DECODED] = ranks.tell(tau)
        tau = numbers.get(DECODED if self.decode is not None else EXPECTED)
        if tau is not None and tau > self.best.get("tau", 0.0):
            self.best = {"step": module.step, "tau": tau, "numbers": numbers}
            if ranks.first():
                checkpoint.put(self.path, self.best | {"drafter": weights})
        return numbers

    @torch.no_grad()
    def _expected(self, module: DrafterTraining) -> dict[str, float]:
        sums, measured = module.new_sums(), module.validated.eval()
        with module.trainer.precision_plugin.val_step_context():
            for batch in self.data.validation_loader():
                sums.add(measured(batch.to(module.device))[1])
        measured.train()
        sums.exchange()
        return sums.metrics("validation", curve=True)


def decoder(target: Target, prompts: list[list[int]], tokens: int) -> Callable[[Drafter], float]:
    """Greedy decoding of `prompts` with a drafter, `tokens` new ones at most for each."""

    def decode(drafter: Drafter) -> float:
        decoder, stats = SpeculativeDecoder.with_drafter(target, drafter), DecodingStats()
        for prompt in prompts:
            stats.merge(decoder.generate(prompt, tokens).stats)
        return stats.tau

    return decode
