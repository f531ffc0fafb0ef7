"""The LightningModule: what an optimiser step is, on any number of micro-batches and processes."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dspark_train import ranks
from dspark_train.config import TrainConfig
from dspark_train.data.batch import Batch
from dspark_train.drafter import Drafter
from dspark_train.objective import LossTerms, ObjectiveWeights, lean_loss, reference_loss
from dspark_train.target.head import TargetHead
from dspark_train.training.checks import Checks
from dspark_train.training.forward import block_states
from dspark_train.training.optimiser import is_head, make_optimiser
from dspark_train.training.sums import Sums

PARTS = ("all", "backbone", "heads")


class DrafterLoss(nn.Module):
    """A drafter and what it is trained for: a batch in, its loss terms out."""

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        *,
        part: str,
        objective: ObjectiveWeights,
        confidence_trains_backbone: bool,
        memory_mb: float | None,
        kernel: str,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.part, self.objective = part, objective
        self.memory_mb, self.kernel = memory_mb, kernel
        self.confidence_trains_backbone = confidence_trains_backbone
        # the target's head is frozen and shared: kept out of the module's state and its casts
        self.__dict__["head"] = head
        ids = drafter.draft_ids
        self.__dict__["loss_head"] = head if ids is None else head.restricted(ids)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, LossTerms]:
        """Numerator (first, where sharded training looks for gradients) and all terms."""
        states = block_states(
            self.drafter,
            self.head,
            batch,
            heads=self.part != "backbone",
            train_backbone=self.part != "heads",
            confidence_trains_backbone=self.confidence_trains_backbone,
        )
        markov = self.drafter.markov_head
        w2 = None if markov is None else markov.markov_w2.weight
        if self.memory_mb is None:
            terms = reference_loss(states, self.loss_head, w2, self.objective)
        else:
            terms = lean_loss(
                states,
                self.loss_head,
                w2,
                self.objective,
                memory_mb=self.memory_mb,
                kernel=self.kernel,
            )
        return terms.numerator, terms


class DrafterTraining(LightningModule):
    """Trains a part of a drafter: "all" (joint), the "backbone" without heads, or the "heads".

    Every micro-batch adds the gradient of its numerator. Before the optimiser steps, the sum over
    all micro-batches and processes is divided by the sum of their weights: the same loss, however
    a step is shared out.

    Attributes:
        step: optimiser steps that are done, those before an interruption included.
        numbers: what the last step is logged with.
        raised: what `ask` said, on any process, when the last step was made.
    """

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        *,
        part: str,
        objective: ObjectiveWeights,
        confidence_trains_backbone: bool,
        settings: TrainConfig,
        lr: float,
        total_steps: int,
        ask: Callable[[], tuple[bool, ...]] = tuple,
    ) -> None:
        super().__init__()
        assert part in PARTS
        drafter.attention = settings.attention
        self.settings, self.lr, self.total_steps = settings, lr, total_steps
        self.ask, self.raised, self.numbers, self.start = ask, (), {}, 0
        for name, parameter in drafter.named_parameters():
            trained = part != "backbone" if is_head(name) else part != "heads"
            # without a loss of its own the confidence head would keep its first weights unnoticed
            idle = name.startswith("confidence_head") and objective.confidence == 0
            parameter.requires_grad_(trained and not idle)

        def loss_of(drafter: Drafter) -> DrafterLoss:
            return DrafterLoss(
                drafter,
                head,
                part=part,
                objective=objective,
                confidence_trains_backbone=confidence_trains_backbone,
                memory_mb=settings.loss_memory_mb,
                kernel=settings.loss_kernel,
            )

        self.loss, self.average = loss_of(drafter), None
        if settings.ema:  # of the drafter alone: the target's head is shared, and cannot be copied
            self.average = loss_of(copy.deepcopy(drafter)).requires_grad_(False)
        if settings.checkpoint_activations:
            drafter.gradient_checkpointing_enable({"use_reentrant": False})
        if settings.compile:
            for layer in drafter.layers:
                layer.compile(dynamic=True)
        self.checks = Checks()

    @property
    def step(self) -> int:
        return self.start + self.trainer.global_step

    @property
    def validated(self) -> DrafterLoss:
        """The drafter whose weights count: the average of the weights where there is one."""
        return self.loss if self.average is None else self.average

    def configure_model(self) -> None:
        """Share the parameters out, where the strategy wants that."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for part in (self.loss, self.average):
                if part is not None:
                    fully_shard(part, mesh=mesh)

    def configure_optimizers(self) -> dict[str, Any]:
        optimiser, schedule = make_optimiser(
            self.loss.drafter.named_parameters(), self.settings, self.lr, self.total_steps
        )
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_train_start(self) -> None:
        self._sums = self.new_sums()

    def new_sums(self) -> Sums:
        return Sums(self.loss.drafter.slots.num_proposals, self.device)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        numerator, terms = self.loss(batch)
        if not torch.isfinite(numerator):
            self.checks.blame(batch, self.loss.drafter)
        self._sums.add(terms)
        return numerator

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Sums become means: gradients, and the numbers that are watched."""
        sums, self._sums = self._sums, self.new_sums()
        self.raised = sums.exchange(*self.ask())
        self.checks.require_finite(sums, self.step)
        self.checks.count(sums)
        parameters = [p for p in self.loss.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        # Lightning has divided by the micro-batches, the strategy by the processes
        divided_by = self.trainer.accumulate_grad_batches * ranks.world_size()
        torch._foreach_mul_(gradients, divided_by / max(sums.weight, 1e-6))
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if self.settings.clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.settings.clip, norm)
        rates = [group["lr"] for group in optimizer.param_groups]
        self.numbers = sums.metrics("train") | {
            "train/gradient_norm": norm.item(),
            "train/anchors": sums.blocks,
            "train/supervised": sums.supervised,
            "lr": max(rates),
        }

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.average is not None:
            # early on, an average of few weights
            decay = min(self.settings.ema, (self.step + 1) / (self.step + 10))
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(self.average.parameters()), list(self.loss.parameters()), 1.0 - decay
                )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be shared out over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
