"""One call of Lightning: fit a part of a drafter, continue if it was interrupted."""

import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import seed_everything

from dspark_train import ranks
from dspark_train.artifacts import ArtifactWriter
from dspark_train.config import Config
from dspark_train.data.datamodule import FeatureData, Features
from dspark_train.drafter import Drafter
from dspark_train.objective import ObjectiveWeights
from dspark_train.target.head import TargetHead
from dspark_train.training import checkpoint, launch, logs
from dspark_train.training.callbacks import Between, ProgressBar
from dspark_train.training.module import DrafterTraining
from dspark_train.training.validation import Validation

LAST, BEST = "last.ckpt", "best.ckpt"
# from prompts to a measure of drafters
Decoding = Callable[[list[list[int]]], Callable[[Drafter], float]]


def fit(
    config: Config,
    drafter: Drafter,
    head: TargetHead,
    store: Features,
    *,
    part: str,
    epochs: int,
    lr: float,
    writer: ArtifactWriter,
    device: torch.device,
    decode: Decoding | None = None,
) -> tuple[Drafter, dict[str, Any]]:
    """Train `part` of `drafter`; every process of the run calls this.

    Logs go to `logs` of the artifact, checkpoints to its scratch folder. If there is one, training
    continues from it and ends with the same weights.

    Args:
        decode: makes a measure of decoding out of prompts, for `train.decode_validation`.

    Returns:
        The trained drafter on the CPU, and numbers of the run: steps, epochs, the step whose
        weights were kept, and the last value of every logged metric (in validation that of the
        weights that were kept). Rank 0's are those that count.

    Raises:
        ValueError: a loss that is not finite, data with nothing to train on, weights that do not
            move, a damaged checkpoint, or settings that Lightning refuses.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once a checkpoint is saved.
    """
    s = config.train
    seed_everything(s.seed, workers=True, verbose=False)
    processes = launch.Launch.of(s.trainer)
    data = FeatureData(store, s, epochs, processes.processes)
    last, best = writer.scratch / LAST, writer.scratch / BEST
    decoding = decode(data.prompts(s.decode_validation)) if decode is not None else None
    validation = Validation(data, s.validate_steps or data.steps_per_epoch, best, decoding)
    bar = ProgressBar(writer.directory.name, data.steps)
    between = Between(last, s.checkpoint_minutes, data, validation, bar)
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
        total_steps=data.steps,
        ask=between.ask,
    )
    trainer = launch.make_trainer(
        {
            "max_epochs": 1,
            "accumulate_grad_batches": data.shares.micro_batches,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "logger": logs.loggers(
                config.logger, writer.directory, f"{config.name}/{writer.directory.name}"
            )
            if ranks.first()
            else False,
            "callbacks": [bar, between],
            "use_distributed_sampler": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        },
        s,
        processes,
        device,
    )
    if ranks.first():
        writer.begin()
    if ranks.tell(last.exists()):
        between.state = checkpoint.load(last)
        data.start = module.start = between.state["progress"]["step"]
    earlier = writer.scratch / "metrics.csv"
    whole: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if ranks.first():
        whole = logs.whole_metrics(writer.directory, earlier, data.start > 0)
    try:
        with between.listening(), ranks.hearing(), whole:
            trainer.fit(module, data)
            weights = checkpoint.current_weights(module)
    except SystemExit as error:  # Lightning's way of passing on what our callback raised
        raise KeyboardInterrupt from error
    finally:
        logs.close(config.logger)
        if processes.by_lightning and ranks.first():
            launch.part_from_children()
    kept = module.step
    if s.keep == "best" and validation.best and ranks.first():
        found = checkpoint.load(best)
        kept, weights = found["step"], found["drafter"]
        between.numbers |= found["numbers"]
    trained = Drafter(drafter.config)
    if ranks.first():
        trained.load_state_dict(weights)
    metrics = {key: round(value, 6) for key, value in between.numbers.items()}
    numbers = {"steps": module.step, "epochs": epochs, "kept_step": kept, "metrics": metrics}
    return trained, numbers
