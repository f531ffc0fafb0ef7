"""One call of Lightning: fit a part of a drafter, continue if it was interrupted."""

import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from dspark_train.config import Config
from dspark_train.data.datamodule import FeatureData
from dspark_train.data.store import FeatureStore
from dspark_train.drafter import Drafter
from dspark_train.objective import ObjectiveWeights
from dspark_train.target.head import TargetHead
from dspark_train.training.module import DrafterTraining


def loggers(config: Config, directory: Path) -> list[Logger]:
    """CSV always, wandb and TensorBoard by configuration.

    Raises:
        ValueError: TensorBoard is asked for and not installed.
    """
    chosen: list[Logger] = [CSVLogger(directory, name="logs", version="")]
    if config.logger.wandb:
        chosen.append(
            WandbLogger(
                name=f"{config.name}/{directory.name}",
                project=config.logger.project,
                save_dir=directory,
                offline=config.logger.wandb == "offline",
            )
        )
    if config.logger.tensorboard:
        try:
            chosen.append(TensorBoardLogger(directory, name="tensorboard", version=""))
        except ModuleNotFoundError as error:
            raise ValueError(
                "logger.tensorboard=true needs a package: pip install tensorboard"
            ) from error
    return chosen


def fit(
    config: Config,
    drafter: Drafter,
    head: TargetHead,
    store: FeatureStore,
    *,
    part: str,
    epochs: int,
    lr: float,
    directory: Path,
    accelerator: str,
) -> dict[str, Any]:
    """Train `part` of `drafter` in place.

    Checkpoints lie in `directory/checkpoints`; if there is one, training continues from it.

    Returns:
        Numbers of the run: steps, epochs, and the last value of every logged metric.

    Raises:
        ValueError: a loss that is not finite, or data with nothing to train on.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    s = config.train
    seed_everything(s.seed, workers=True, verbose=False)
    data = FeatureData(store, s, epochs)
    batches = len(data.train_batches)
    objective = config.objective
    module = DrafterTraining(
        drafter,
        head,
        part=part,
        objective=ObjectiveWeights(
            objective.ce, objective.tv, objective.confidence, objective.loss_decay
        ),
        confidence_trains_backbone=objective.confidence_trains_backbone,
        settings=s,
        lr=lr,
        total_steps=-(-batches // s.accumulate),
    )
    checkpoints = ModelCheckpoint(
        dirpath=directory / "checkpoints",
        filename="last",
        train_time_interval=timedelta(minutes=s.checkpoint_minutes),
        save_on_exception=True,
        enable_version_counter=False,
    )
    trainer = Trainer(
        **{
            "accelerator": accelerator,
            "precision": s.precision,
            "max_epochs": 1,
            "accumulate_grad_batches": s.accumulate,
            "gradient_clip_val": s.clip,
            "val_check_interval": data.batches_per_epoch if len(data.validation_batches) else None,
            "limit_val_batches": 1.0 if len(data.validation_batches) else 0,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "logger": loggers(config, directory),
            "callbacks": [checkpoints, TQDMProgressBar(), LearningRateMonitor("step")],
            "use_distributed_sampler": False,
            "enable_model_summary": False,
            **s.trainer,
        }
    )
    last = directory / "checkpoints" / "last.ckpt"
    trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    metrics = {
        key: round(value.item(), 6)
        for key, value in trainer.callback_metrics.items()
        if isinstance(value, torch.Tensor)
    }
    return {"steps": trainer.global_step, "epochs": epochs, "metrics": metrics}
