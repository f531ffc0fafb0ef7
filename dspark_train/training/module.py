"""The LightningModule: one step of drafter training, and what is watched."""

from typing import Any

import torch
from lightning.pytorch import LightningModule

from dspark_train.config import TrainConfig
from dspark_train.data.batch import Batch
from dspark_train.drafter import Drafter
from dspark_train.objective import LossTerms, ObjectiveWeights, lean_loss, reference_loss
from dspark_train.target.head import TargetHead
from dspark_train.training.forward import block_states
from dspark_train.training.optimiser import adamw

PARTS = ("all", "backbone", "heads")


class DrafterTraining(LightningModule):
    """Trains a part of a drafter: "all" (joint), the "backbone" without heads, or the "heads"."""

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
    ) -> None:
        super().__init__()
        assert part in PARTS
        self.drafter = drafter
        drafter.attention = settings.attention
        self.part = part
        self.objective = objective
        self.confidence_trains_backbone = confidence_trains_backbone
        self.settings, self.lr, self.total_steps = settings, lr, total_steps
        # the target's head is frozen and shared: kept out of the module's state and its casts
        self.__dict__["head"] = head
        ids = drafter.draft_ids
        self.__dict__["loss_head"] = head if ids is None else head.restricted(ids)
        trained = {"backbone": part != "heads", "heads": part != "backbone"}
        for name, parameter in drafter.named_parameters():
            is_head = name.startswith(("markov_head", "confidence_head"))
            parameter.requires_grad_(trained["heads" if is_head else "backbone"])

    def configure_optimizers(self) -> dict[str, Any]:
        s = self.settings
        optimiser, schedule = adamw(
            self.drafter.parameters(),
            lr=self.lr,
            betas=(s.betas[0], s.betas[1]),
            weight_decay=s.weight_decay,
            warmup=s.warmup,
            total=self.total_steps,
        )
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def terms(self, batch: Batch) -> LossTerms:
        """Loss terms of a batch for the part that is trained."""
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
        if self.settings.loss_memory_mb is None:
            return reference_loss(states, self.loss_head, w2, self.objective)
        memory, kernel = self.settings.loss_memory_mb, self.settings.loss_kernel
        return lean_loss(
            states, self.loss_head, w2, self.objective, memory_mb=memory, kernel=kernel
        )

    def _loss(self, terms: LossTerms) -> torch.Tensor:
        # ranks average their gradients, so each divides by the mean of the ranks' weights
        denominator = self.all_gather(terms.weight).mean()
        return terms.loss(denominator)

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        terms = self.terms(batch)
        loss = self._loss(terms)
        if not torch.isfinite(loss):
            raise ValueError(
                f"the loss of step {self.global_step} is {loss.item()}: the features of this batch "
                "or the weights are not finite; lower train.lr, or capture again"
            )
        self.log("train/loss", loss.detach(), prog_bar=True)
        self._watch("train", terms)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        terms = self.terms(batch)
        weight = float(terms.blocks)
        if weight:
            self.log("validation/loss", terms.loss(), batch_size=round(weight), sync_dist=True)
            self._watch("validation", terms)

    def _watch(self, stage: str, terms: LossTerms) -> None:
        """Expected τ, and per proposal acceptance and confidence error, over supervised ones."""
        blocks = int(terms.blocks)
        sync = stage == "validation"
        if not blocks:
            return
        tau = terms.expected_length / terms.blocks
        self.log(f"{stage}/tau", tau, prog_bar=True, batch_size=blocks, sync_dist=sync)
        for k, count in enumerate(terms.supervised.tolist()):
            if count:
                acceptance = terms.acceptance[k] / count
                self.log(f"{stage}/acceptance_{k}", acceptance, batch_size=count, sync_dist=sync)
                if self.part != "backbone" and self.drafter.confidence_head is not None:
                    error = terms.confidence_error[k] / count
                    name = f"{stage}/confidence_error_{k}"
                    self.log(name, error, batch_size=count, sync_dist=sync)
