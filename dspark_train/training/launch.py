"""How many processes train together, who started them, and what Lightning is told about it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from dspark_train import ranks
from dspark_train.config import TrainConfig

# set by Lightning where it starts the other processes itself
LEFT_BEHIND = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """Processes of a training: `devices` on each of `num_nodes` machines."""

    devices: int
    num_nodes: int

    @property
    def processes(self) -> int:
        return self.devices * self.num_nodes

    @classmethod
    def of(cls, trainer: Mapping[str, Any]) -> "Launch":
        """What the launcher started, or else what `train.trainer` asks Lightning to start."""
        if ranks.launched():
            local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size()))
            return cls(local, ranks.world_size() // local)
        return cls(ranks.count(trainer.get("devices")), trainer.get("num_nodes", 1))

    @property
    def by_lightning(self) -> bool:
        """Whether Lightning starts the other processes."""
        return self.processes > 1 and not ranks.launched()


def strategy(settings: TrainConfig, launch: Launch) -> Strategy | str:
    """Lightning's strategy for `train.strategy`."""
    if launch.processes == 1:
        return "auto"
    if settings.strategy == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=launch.processes, tensor_parallel_size=1)
    return DDPStrategy(gradient_as_bucket_view=True)


def make_trainer(
    ours: dict[str, Any], settings: TrainConfig, launch: Launch, device: torch.device
) -> Trainer:
    """Lightning's trainer with our settings, and those of `train.trainer` over them.

    Raises:
        ValueError: Lightning refuses them.
    """
    given = {k: v for k, v in settings.trainer.items() if k not in ("devices", "num_nodes")}
    chosen = launch.processes == 1 and device.index is not None
    places = {
        "accelerator": device.type,
        "devices": [device.index] if chosen else launch.devices,
        "num_nodes": launch.num_nodes,
        "precision": settings.precision,
    }
    try:
        return Trainer(**{**ours, **places, "strategy": strategy(settings, launch), **given})
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise ValueError(
            f"Lightning refuses train.precision={settings.precision}, "
            f"train.trainer={settings.trainer}: {error}"
        ) from error


def part_from_children() -> None:
    """Forget the processes that Lightning started for a training, so that another one can begin."""
    ranks.leave()
    for name in LEFT_BEHIND:
        os.environ.pop(name, None)
