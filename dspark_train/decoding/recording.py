"""Work of fixed shapes, recorded once: on a GPU its kernels are then launched as one CUDA graph.

A graph replays kernels on the same addresses, and no Python. So recorded work reads what changes
from tensors that it owns, sizes come in tiers, and nothing in it may wait for a value on the host.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

# runs before the recording, in which libraries choose kernels and allocate
WARM_UPS = 2
# gives its results in the same tensors every time
Work = Callable[[], Any]


def tier(size: int, largest: int | None = None) -> int:
    """The power of two from `size` on, at most `largest`."""
    power = 1 << (size - 1).bit_length()
    return power if largest is None else min(power, largest)


class Recorder:
    """Recorded work by its shape. Devices other than CUDA run it as it is.

    Args:
        device: that the work runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, None
        self.recorded: dict[Hashable, Any] = {}
        self.storage: Hashable = None

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
        """`work`, from its first call on as one graph on CUDA.

        That call runs it several times, on what its tensors hold then: once more must do no harm.
        """
        recorded: list[Work] = []

        def call() -> Any:
            if not recorded:
                recorded.append(self._capture(work))
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
