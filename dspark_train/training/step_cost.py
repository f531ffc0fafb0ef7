"""What a training step costs: one case in a process of its own, which may run out of memory.

`python -m dspark_train.training.step_cost '{"case": "loss", …}'` prints one line of JSON.
"""

import json
import resource
import statistics
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from dspark_train.blocks import ContextSpan
from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.objective import BlockStates, ObjectiveWeights, lean_loss, reference_loss
from dspark_train.target.head import TargetHead


@dataclass(frozen=True)
class Shape:
    """Sizes of a step: blocks drawn from one document of `context` tokens."""

    anchors: int
    block_size: int
    context: int
    hidden_size: int
    vocab_size: int
    markov_rank: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "smollm2_135m": Shape(64, 7, 256, 576, 49_152, 64, 1536, 9, 3, 64),
    "qwen3_4b": Shape(512, 7, 1024, 2560, 151_936, 256, 9728, 32, 8, 128),
}


LEAVES = ("hidden", "latents", "confidence_logits")


def loss_case(
    shape: Shape, loss: str, steps: int, memory_mb: float, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Forward and backward of a loss at random states.

    Args:
        loss: "reference" or "lean".
        steps: timed ones; with more than one, one before them warms up.

    Returns:
        `seconds` of each step, `peak_mb` above what was there before, None where the system does
        not tell, and `loss` and `gradient` (its norm by the hidden states) to compare.
    """
    torch.manual_seed(0)
    N, P, D, V, R = (
        shape.anchors, shape.block_size, shape.hidden_size, shape.vocab_size, shape.markov_rank,
    )  # fmt: skip
    head = random_head(V, D, device, dtype)
    anchors = torch.randperm(shape.context - P)[:N].sort().values
    used, rows = (anchors[:, None] + torch.arange(P)).unique(return_inverse=True)

    def normal(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    states = BlockStates(
        hidden=normal(N, P, D).requires_grad_(),
        latents=normal(N, P, R).requires_grad_(),
        confidence_logits=normal(N, P, dtype=torch.float32).requires_grad_(),
        labels=torch.randint(V, (N, P), device=device),
        supervised=torch.ones(N, P, dtype=torch.bool, device=device),
        target_hidden=normal(len(used), D),
        target_rows=rows.to(device),
    )
    w2 = (normal(V, R, dtype=torch.float32) * 0.1).requires_grad_()
    weights, found = ObjectiveWeights(), {}

    def step(states: BlockStates = states) -> None:
        for leaf in (*(getattr(states, key) for key in LEAVES), w2):
            leaf.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            if loss == "lean":
                terms = lean_loss(states, head, w2, weights, memory_mb=memory_mb)
            else:
                terms = reference_loss(states, head, w2, weights)
            value = terms.loss()
        value.backward()
        found.update(loss=value.item(), gradient=states.hidden.grad.float().norm().item())

    one = {f.name: getattr(states, f.name) for f in fields(states)}
    one |= {key: one[key].detach()[:1].requires_grad_() for key in LEAVES}
    one |= {key: one[key][:1] for key in ("labels", "supervised", "target_rows")}
    step(BlockStates(**one))  # libraries are loaded and their memory is taken
    memory = PeakMemory(device)
    if steps > 1:
        step()
    seconds = [timed(step, device) for _ in range(steps)]
    return {"seconds": seconds, "peak_mb": memory.peak_mb(), **found}


def anchors_case(
    shape: Shape, anchors: list[int], rounds: int, attention: str, device: torch.device
) -> dict[str, Any]:
    """Median seconds of forward and backward of two layers, by number of anchors, interleaved."""
    torch.manual_seed(0)
    config = DrafterConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        target_layer_ids=[0, 1, 2, 3, 4],
        num_target_layers=8,
        markov_head_type=None,
    )
    drafter = Drafter(config).to(device)
    drafter.attention = attention
    S, D = max(anchors) + 1, shape.hidden_size
    features = torch.randn(1, S, 5 * D, device=device)

    def step(count: int) -> None:
        at = 1 + torch.randperm(S - 1)[:count].sort().values[None].to(device)
        embeddings = torch.randn(1, count, shape.block_size, D, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            context = drafter.context_kv(features, torch.arange(S, device=device)[None])
            span = ContextSpan(torch.zeros_like(at), at)
            hidden = drafter.backbone(embeddings, drafter.slots.positions(at), context, span)
        hidden.float().square().mean().backward()

    times: dict[int, list[float]] = {count: [] for count in anchors}
    for turn in range(rounds + 1):
        for count in anchors:
            second = timed(lambda count=count: step(count), device)
            if turn:  # the first round warms up
                times[count].append(second)
    return {"seconds": {count: statistics.median(values) for count, values in times.items()}}


def random_head(V: int, D: int, device: torch.device, dtype: torch.dtype) -> TargetHead:  # noqa: N803
    """A head with tied random weights, without the rest of a target."""
    projection = nn.Linear(D, V, bias=False, device="meta")
    weight = torch.empty(V, D, dtype=dtype, device=device).normal_(std=0.05)
    projection.weight = nn.Parameter(weight)
    model = SimpleNamespace(
        config=PreTrainedConfig(),
        get_input_embeddings=lambda: nn.Embedding.from_pretrained(weight),
        get_output_embeddings=lambda: projection,
    )
    return TargetHead(model)


def timed(step: Any, device: torch.device) -> float:
    """Seconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - begin


class PeakMemory:
    """The most memory that was in use since it was made, above what was then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif (resetting := Path("/proc/self/clear_refs")).exists():
            resetting.write_text("5")
        self.before = self._now()

    def _now(self) -> float | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        status = Path("/proc/self/status")
        if not status.exists():
            return None
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    def peak_mb(self) -> float | None:
        """Megabytes; None where the system does not tell."""
        return None if self.before is None else self._now() - self.before


def keep_to_free_memory() -> None:
    """More than nine tenths of what is free fails here, so that no other process is killed."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return
    (free,) = (line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    (size,) = Path("/proc/self/statm").read_text().split()[:1]
    limit = int(size) * resource.getpagesize() + int(free.split()[1]) * 1024 * 9 // 10
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Run a case from its JSON description."""
    case, shape = given.pop("case"), SHAPES[given.pop("shape")]
    if threads := given.pop("threads"):
        torch.set_num_threads(threads)
    shape = replace(shape, **given.pop("sizes", {}))
    device = torch.device(given.pop("device"))
    if device.type == "cpu":
        keep_to_free_memory()
    try:
        if case == "anchors":
            return anchors_case(shape, device=device, **given)
        dtype = getattr(torch, given.pop("dtype"))
        return loss_case(shape, device=device, dtype=dtype, **given)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        first = str(error).strip().split("\n", 1)[0]
        if "memory" not in first:
            raise
        return {"out_of_memory": first}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
