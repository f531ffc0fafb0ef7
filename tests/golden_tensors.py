"""Reading the reference tensors of tests/golden."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.target.head import TargetHead

FOLDER = Path(__file__).parent / "golden"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "block_size",
    "mask_token_id",
)


def head_of(embedding: torch.Tensor, projection: torch.Tensor, **config: Any) -> TargetHead:
    """A target's head from embedding and LM head `[V, D]`; `config` sets cap and scale."""
    vocab, width = projection.shape
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=width,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            **config,
        )
    )
    model.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
    model.lm_head.weight = nn.Parameter(projection)
    return TargetHead(model)


def selector_name(name: str) -> str:
    """Our name of a parameter of DFlash2's selector."""
    for theirs, ours in (
        ("candidate_selector.predecessor_codebook", "markov_head.markov_w1.weight"),
        ("candidate_selector.successor_codebook", "markov_head.markov_w2.weight"),
        ("candidate_selector.", "markov_head."),
    ):
        name = name.replace(theirs, ours)
    return name


def load(name: str) -> tuple[Drafter, TargetHead, dict[str, torch.Tensor]]:
    """The drafter with the reference weights, the head, and all tensors of the file."""
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    kind = metadata.get("markov_head_type")
    convolved = {k: int(v) for k, v in metadata.items() if k.startswith(("conv_", "selector_top"))}
    head = "selector" if convolved else kind
    config = DrafterConfig(
        **{key: int(metadata[key]) for key in SIZES},
        target_layer_ids=json.loads(metadata["target_layer_ids"]),
        num_target_layers=12,
        rms_norm_eps=float(metadata["rms_norm_eps"]),
        rope_parameters={"rope_type": "default", "rope_theta": float(metadata["rope_theta"])},
        sample_from_anchor=kind is not None,
        markov_head_type=head,
        markov_rank=int(metadata.get("markov_rank", metadata.get("selector_rank", 8))),
        **convolved,
        enable_confidence_head=kind is not None,
    )
    drafter = Drafter(config)
    weights = {
        k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")
    }
    for shared in ("embed_tokens.weight", "lm_head.weight"):
        del weights[shared]
    drafter.load_state_dict({selector_name(name): value for name, value in weights.items()})
    head = head_of(tensors["weights.embed_tokens.weight"], tensors["weights.lm_head.weight"])
    return drafter.eval(), head, tensors
