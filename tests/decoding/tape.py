"""A stand-in for CUDA graphs: records what work did to tensors, and does it again.

As a graph does, it replays operations on the same storage without running any Python, and refuses
what a graph cannot hold: values that are read on the host, and tensors made from host data.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark_train.decoding.compiling import NoHostMethods, NoHostReads


class Tape(TorchDispatchMode):
    """Everything that ran within."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Callable[..., Any], tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.done.append((func, args, kwargs, results))
        return results

    def replay(self) -> None:
        """All of it again, into the same tensors."""
        for func, args, kwargs, results in self.done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def taped(work: Callable[[], Any]) -> Callable[[], Any]:
    """For `Recorder`: run once, then only replayed."""
    tape = Tape()
    with tape, NoHostReads(), NoHostMethods():
        results = work()

    def replay() -> Any:
        tape.replay()
        return results

    return replay
