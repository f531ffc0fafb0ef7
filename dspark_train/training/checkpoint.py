"""Checkpoints of a training, the same for every strategy and any number of processes.

Weights and moments are kept whole and by name. A step is the only place there is: the schedule of
documents depends on the settings alone, and nothing in training draws random numbers.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dspark_train import ranks
from dspark_train.disk import full_disk_explained, write_atomically
from dspark_train.training.module import DrafterTraining

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_WHOLE = StateDictOptions(full_state_dict=True)
State = dict[str, Any]


def save(path: Path, module: DrafterTraining, progress: State) -> None:
    """Replace the checkpoint at `path` by one of now; all processes take part, rank 0 writes."""
    optimiser, schedule = module.trainer.optimizers[0], module.lr_schedulers()
    state = {
        "model": get_model_state_dict(module, options=WHOLE),
        "optimiser": get_optimizer_state_dict(module, optimiser, options=WHOLE),
        "schedule": schedule.state_dict(),
        "progress": progress,
    }
    if ranks.first():
        put(path, state)


def load(path: Path) -> State:
    """A checkpoint; its tensors are read when they are used.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(
            f"{path} is damaged ({str(error).splitlines()[0]}): redo the stage with "
            f"force=[{path.parent.parent.name}]"
        ) from error


def restore(state: State, module: DrafterTraining, stage: str) -> None:
    """Take weights, moments and schedule from a checkpoint, into whatever strategy is used now.

    Args:
        stage: whose checkpoint it is.

    Raises:
        ValueError: it holds something else, as that of another version of this program may.
    """
    optimiser, schedule = module.trainer.optimizers[0], module.lr_schedulers()
    try:
        # torch leaves weights that a whole checkpoint lacks as they are
        if differ := module.state_dict().keys() ^ state["model"].keys():
            raise ValueError(f"weights {sorted(differ)} are not on both sides")
        set_model_state_dict(module, state["model"], options=FROM_WHOLE)
        set_optimizer_state_dict(module, optimiser, state["optimiser"], options=FROM_WHOLE)
        schedule.load_state_dict(state["schedule"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint of this training is not one that can be continued ({error}); another "
            f"version of this program may have made it: redo the stage with force=[{stage}]"
        ) from error


def drafter_weights(model: State) -> State:
    """A drafter's weights out of those of its training: the averaged ones where there are any."""
    averaged = any(name.startswith("average.") for name in model)
    prefix = ("average." if averaged else "loss.") + "drafter."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in model.items()
        if name.startswith(prefix)
    }


def current_weights(module: DrafterTraining) -> State:
    """The drafter's weights as they are now, whole on rank 0; all processes take part."""
    return drafter_weights(get_model_state_dict(module, options=WHOLE))


def put(path: Path, state: State) -> None:
    """Write a state atomically."""
    with full_disk_explained(path):
        write_atomically(path, lambda temporary: torch.save(state, temporary))
