"""One call of Lightning: fit a part of a drafter, continue if it was interrupted."""

from dataclasses import fields
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor

from dspark_train.artifacts import ArtifactWriter
from dspark_train.config import Config
from dspark_train.data.datamodule import FeatureData
from dspark_train.data.store import FeatureStore
from dspark_train.drafter import Drafter
from dspark_train.objective import ObjectiveWeights
from dspark_train.target.head import TargetHead
from dspark_train.training import logs
from dspark_train.training.callbacks import Checkpoints, ProgressBar
from dspark_train.training.module import DrafterTraining


def fit(
    config: Config,
    drafter: Drafter,
    head: TargetHead,
    store: FeatureStore,
    *,
    part: str,
    epochs: int,
    lr: float,
    writer: ArtifactWriter,
    device: torch.device,
) -> dict[str, Any]:
    """Train `part` of `drafter` in place.

    Logs go to `logs` of the artifact, a checkpoint to its scratch folder. If there is one, training
    continues from it and ends with the same weights.

    Returns:
        Numbers of the run: steps, epochs, and the last value of every logged metric.

    Raises:
        ValueError: a loss that is not finite, data with nothing to train on, or settings that
            Lightning refuses.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once a checkpoint is saved.
    """
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
            **{f.name: getattr(objective, f.name) for f in fields(ObjectiveWeights)}
        ),
        confidence_trains_backbone=objective.confidence_trains_backbone,
        settings=s,
        lr=lr,
        total_steps=-(-batches // s.accumulate),
    )
    directory, last = writer.directory, writer.scratch / "last.ckpt"
    loggers = logs.loggers(config.logger, directory, f"{config.name}/{directory.name}")
    checkpoints = Checkpoints(last, s.checkpoint_minutes)
    trainer = make_trainer(
        {
            "accelerator": device.type,
            "devices": "auto" if device.index is None else [device.index],
            "precision": s.precision,
            "max_epochs": 1,
            "accumulate_grad_batches": s.accumulate,
            "gradient_clip_val": s.clip,
            "val_check_interval": data.batches_per_epoch if len(data.validation_batches) else None,
            "limit_val_batches": 1.0 if len(data.validation_batches) else 0,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "logger": loggers,
            "callbacks": [ProgressBar(directory.name), LearningRateMonitor("step"), checkpoints],
            "use_distributed_sampler": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        },
        s.trainer,
    )
    writer.begin()
    resumed, earlier = last.exists(), writer.scratch / "metrics.csv"
    try:
        with checkpoints.listening(), logs.whole_metrics(directory, earlier, resumed):
            trainer.fit(module, data, ckpt_path=last if resumed else None)
    except SystemExit as error:  # Lightning's way of passing on what our callback raised
        raise KeyboardInterrupt from error
    finally:
        logs.close(config.logger)
    metrics = {
        key: round(value.item(), 6)
        for key, value in trainer.callback_metrics.items()
        if isinstance(value, torch.Tensor)
    }
    return {"steps": trainer.global_step, "epochs": epochs, "metrics": metrics}


def make_trainer(ours: dict[str, Any], given: dict[str, Any]) -> Trainer:
    """Lightning's trainer with our settings, and those of `train.trainer` over them.

    Raises:
        ValueError: Lightning refuses them.
    """
    try:
        return Trainer(**{**ours, **given})
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise ValueError(
            f"Lightning refuses train.precision={ours['precision']}, train.trainer={given}: {error}"
        ) from error
