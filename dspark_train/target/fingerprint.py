"""Identity of a target's configuration and weights, cheap enough to take at every load."""

import hashlib
import json

import torch
from transformers import PreTrainedModel

SAMPLED_PER_TENSOR = 64
# Not facts about the model, but about who saved it and how it was loaded.
VOLATILE = {"transformers_version", "_name_or_path", "dtype", "use_cache", "_attn_implementation"}


def config_sha(model: PreTrainedModel) -> str:
    """SHA-256 of the configuration fields that differ from their defaults."""
    fields = {k: v for k, v in model.config.to_diff_dict().items() if k not in VOLATILE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def weights_sha(model: PreTrainedModel) -> str:
    """SHA-256 of 64 evenly spread elements of every tensor, with its name and shape.

    The elements are rounded to bfloat16, so that the result does not depend on the dtype or the
    device which the model was loaded with.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLED_PER_TENSOR)][:SAMPLED_PER_TENSOR]
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.bfloat16().cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
