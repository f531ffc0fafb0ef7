"""Processes that work on one run together: which one this is, and how they wait for each other.

`torchrun`, `accelerate launch` and their like tell every process by environment variables which
rank of how many it is; without them there is one process. Waiting goes over gloo and without a time
limit: rank 0 may decode for hours while the others have nothing to do.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
# how gloo says it
ENDED = ("closed by peer", "Connection reset", "Broken pipe")
FOREVER = timedelta(days=365)

_waiting: dist.ProcessGroup | None = None


def launched() -> bool:
    """Whether a launcher started this process and told it its rank."""
    return "RANK" in os.environ


def rank() -> int:
    """Number of this process among all of the run, over all machines."""
    if dist.is_initialized():
        return dist.get_rank()
    # what Lightning starts on its own knows its number on this machine alone
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))


def world_size() -> int:
    """Processes of the run, over all machines; 1 until those that Lightning starts have met."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1)) if launched() else 1


def count(devices: Any) -> int:
    """Processes that a setting `devices` of Lightning means on one machine."""
    if devices in (None, "auto", -1, "-1"):
        return max(1, torch.cuda.device_count()) if devices is not None else 1
    if isinstance(devices, int):
        return devices
    listed = devices.split(",") if isinstance(devices, str) else list(devices)
    return int(listed[0]) if isinstance(devices, str) and len(listed) == 1 else len(listed)


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
    with hearing():
        act(*arguments, group=_waiting, **more)


@contextlib.contextmanager
def hearing() -> Iterator[None]:
    """Within the context, who speaks with a process that has ended is told so.

    Raises:
        ConnectionError: another process has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size() > 1 and any(sign in str(error) for sign in ENDED):
            raise ConnectionError(
                f"rank {rank()} waited for the others, and one of them has ended: its message says "
                "why"
            ) from error
        raise
