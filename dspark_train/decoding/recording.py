"""Work of fixed shapes: compiled if that is wanted, and on a GPU recorded as one CUDA graph.

A graph replays kernels on the same addresses, and no Python. So recorded work reads what changes
from tensors that it owns, sizes come in tiers, and nothing in it may wait for a value on the host.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.compiling import compiled
from dspark_train.target import Target

# runs before the recording, in which libraries choose kernels and allocate
WARM_UPS = 2
# reads from tensors that it owns
Work = Callable[[], Any]


def tier(size: int, largest: int | None = None) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, … from `size` on, at most `largest`."""
    power = 1 << (size - 1).bit_length()
    between = power * 3 // 4
    found = between if power >= 4 and size <= between else power
    return found if largest is None else min(found, largest)


def tier_of(cache: KVCache, positions: int) -> int:
    """The tier of positions from `positions` on, in blocks of a cache."""
    return cache.block * tier(-(-positions // cache.block))


def room(cache: KVCache, positions: int) -> int:
    """The tier of positions from `positions` on, for which the cache has storage then."""
    end = tier_of(cache, positions)
    cache.reserve(end)
    cache.grow()
    return end


class Recorder:
    """Recorded work by its shape. Devices other than CUDA run what they compiled, or it as it is.

    Args:
        device: that the work runs on.
        layers: that it calls one after the other, to compile it; None: it is not compiled.
    """

    def __init__(self, device: torch.device, layers: Sequence[nn.Module] | None = None) -> None:
        self.device, self.layers, self.pool = device, layers, None
        self.recorded: dict[Hashable, Any] = {}
        self.storage: Hashable = None

    @classmethod
    def of(cls, target: Target, layers: Sequence[nn.Module]) -> "Recorder | None":
        """As `target` wants its rounds; None: not of fixed shapes."""
        if not target.graphs:
            return None
        return cls(target.device, layers if target.compiles else None)

    def get(self, shape: Hashable, make: Callable[[], Any], storage: Hashable = None) -> Any:
        """What `make` made for this shape.

        Args:
            shape: what determines the sizes of all tensors.
            make: called at the first time, to allocate, and to `record`.
            storage: identifies tensors of others that are used; once it changes, all is made anew.
        """
        if storage != self.storage:
            self.clear()
            self.storage = storage
        if shape not in self.recorded:
            self.recorded[shape] = make()
        return self.recorded[shape]

    def clear(self) -> None:
        """Forget all; memory of graphs that are gone is not for new ones."""
        self.recorded.clear()
        self.pool = None

    def record(self, work: Work) -> Work:
        """`work`, from its first call on compiled, and as one graph on CUDA.

        That call runs it several times, on what its tensors hold then: once more must do no harm.
        """
        recorded: list[Work] = []

        def call() -> Any:
            if not recorded:
                ready = work if self.layers is None else compiled(work, self.layers)
                recorded.append(self._capture(ready))
            return recorded[0]()

        return call

    def _capture(self, work: Work) -> Work:
        if self.device.type != "cuda":
            return work
        with torch.cuda.device(self.device):
            before, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(before)
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    work()
            before.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self.pool):
                results = work()

        def replay() -> Any:
            graph.replay()
            return results

        return replay
