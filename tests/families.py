"""Tiny random targets of every family that is claimed to work."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# each crosses its window many times in a test; tied random weights would repeat one token
WINDOW = 8
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "decoder_sparse_step": 1}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 8,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": False,
        },
    ),
    "phi": ("Phi", {}),
    "gpt_oss": (
        "GptOss",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_inner": 48}),
}


def make(family: str, vocab_size: int) -> PreTrainedModel:
    """A tiny random model of a family in float32; large weights, so that tokens differ."""
    name, fields = FAMILIES[family]
    sizes = dict(SIZES)
    if family == "gpt2":
        sizes = {
            "n_embd": 32,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 128,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    text = "Text" if family == "gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**(sizes | fields), vocab_size=vocab_size)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{'LMHeadModel' if family == 'gpt2' else 'ForCausalLM'}")(
        config
    ).eval()
