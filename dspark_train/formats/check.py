"""What was written is read back by the importer and must be the drafter that was meant."""

from pathlib import Path

import torch

from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.formats.destinations import NATIVE
from dspark_train.formats.reading import load_drafter
from dspark_train.target import TargetHead

# what some formats do not say, and what says nothing about the model
UNSAID = {
    "target",
    "num_target_layers",
    "confidence_temperatures",
    "confidence_shifts",
    "unshifted_temperatures",
    "confidence_head_with_markov",
    "enable_confidence_head",
    "is_causal",
}
CONTEXT, BLOCKS = 11, 3


def reload(folder: Path, name: str, drafter: Drafter, head: TargetHead | None) -> Drafter:
    """Read a checkpoint back and compare it with the drafter that was written.

    Raises:
        ValueError: a setting, a weight or a logit differs; it is named.
    """
    read = load_drafter(folder, head=head)
    unsaid = set() if name == NATIVE else UNSAID | _unused(drafter.config)
    for key in set(DrafterConfig.__annotations__) - unsaid:
        found, meant = getattr(read.config, key), getattr(drafter.config, key)
        if found != meant:
            raise ValueError(f"{folder}/config.json says {key}={found}, exported was {meant}")
    written, dropped = read.state_dict(), set()
    for key, tensor in drafter.state_dict().items():
        if key not in written and key.startswith("confidence_head") and name != NATIVE:
            dropped.add(key)
        elif not torch.equal(written[key], tensor.to(written[key].device)):
            raise ValueError(f"{folder}: {key} differs from what was exported")
    if not torch.equal(_logits(read, head), _logits(drafter, head)):
        raise ValueError(f"{folder} gives other logits than the drafter it was written from")
    return read


def _unused(config: DrafterConfig) -> set[str]:
    """Settings without a meaning for this drafter."""
    unused = set()
    if config.markov_head_type is None:
        unused |= {"markov_rank"}
    if config.markov_head_type != "selector":
        unused |= {"selector_top_k"}
    if not config.conv_kernel_size:
        unused |= {"conv_group_size"}
    if not any(config.windows):
        unused |= {"window_from"}
    return unused


@torch.no_grad()
def _logits(drafter: Drafter, head: TargetHead | None) -> torch.Tensor:
    """Logits (hidden states without a head) of every slot of some blocks on a random context."""
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    width, device, dtype = config.hidden_size, drafter.fc.weight.device, drafter.dtype

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    features = random(1, CONTEXT, width * len(config.target_layer_ids))
    context = drafter.context_kv(features, torch.arange(CONTEXT, device=device)[None])
    anchors = torch.full((1, BLOCKS), CONTEXT, device=device)
    states = random(1, BLOCKS, config.block_size, width)
    hidden = drafter.backbone(states, drafter.slots.positions(anchors), context)
    if head is None:
        return hidden
    if drafter.draft_ids is not None:
        head = head.restricted(drafter.draft_ids)
    logits = head.logits(hidden.to(head.projection.weight.device, head.projection.weight.dtype))
    if drafter.markov_head is None:
        return logits
    rows = torch.arange(config.block_size, device=device) % config.vocab_size
    latents, _ = drafter.markov_head.latents(hidden, rows.expand(1, BLOCKS, -1))
    bias = drafter.markov_head.markov_w2(latents).to(logits.device)
    return drafter.markov_head.candidates(logits) + bias
