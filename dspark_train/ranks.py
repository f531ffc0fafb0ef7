"""Processes that work on one run together: which one this is, and how they wait for each other.

`torchrun`, `accelerate launch` and their like tell every process by environment variables which
rank of how many it is; without them there is one process. Waiting goes over gloo and without a time
limit: rank 0 may decode for hours while the others have nothing to do.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
FOREVER = timedelta(days=365)

_waiting: dist.ProcessGroup | None = None


def rank() -> int:
    """Number of this process among all of the run, over all machines."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Processes of the run, over all machines."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Number of this process on its machine, which is that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def first() -> bool:
    """Whether this is rank 0: the one that writes and speaks."""
    return rank() == 0


def share(items: Sequence[T]) -> Sequence[T]:
    """This process's items: every world-size-th, from its rank on. All of them for one process."""
    return items[rank() :: world_size()]


def join() -> None:
    """Meet the other processes; does nothing for one process or a second time.

    Raises:
        ConnectionError: they cannot be reached.
    """
    if world_size() == 1 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} cannot meet the "
            f"others at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {error}"
        ) from error


def leave() -> None:
    """Part from the other processes, so that another group can be made."""
    global _waiting
    _waiting = None
    if dist.is_initialized():
        dist.destroy_process_group()


def tell(what: Any = None) -> Any:
    """Wait for rank 0 to say `what`, which comes back everywhere.

    Raises:
        ConnectionError: another process has ended.
    """
    if world_size() == 1:
        return what
    told = [what]
    _talk(dist.broadcast_object_list, told, src=0)
    return told[0]


def wait() -> None:
    """Wait until all processes are here.

    Raises:
        ConnectionError: another process has ended.
    """
    if world_size() > 1:
        _talk(dist.barrier)


def gather(mine: Any) -> list[Any]:
    """Everybody's `mine`, in order of rank; waits for all.

    Raises:
        ConnectionError: another process has ended.
    """
    if world_size() == 1:
        return [mine]
    all_of_them = [None] * world_size()
    _talk(dist.all_gather_object, all_of_them, mine)
    return all_of_them


def _talk(act: Any, *arguments: Any, **more: Any) -> None:
    global _waiting
    join()
    if _waiting is None:
        _waiting = dist.new_group(backend="gloo", timeout=FOREVER)
    try:
        act(*arguments, group=_waiting, **more)
    except RuntimeError as error:
        raise ConnectionError(
            f"rank {rank()} waited for the others, and one of them has ended: its message says why"
        ) from error
