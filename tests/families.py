"""Tiny random targets of every family that is claimed to work, and some that are refused."""

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
# as the families with recurrent states name their sizes
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "tie_word_embeddings": False,
}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "tie_word_embeddings": False,
}
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
    "qwen3_next": ("Qwen3Next", {**DELTA, **MOE, "shared_expert_intermediate_size": 16}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "tie_word_embeddings": False},
    ),
}
# more ways to keep a state, for decoding alone
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", DELTA),
    "olmo_hybrid": ("OlmoHybrid", DELTA),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 64}),  # both in every layer
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "nemotron_h": (  # one layer keeps nothing
        "NemotronH",
        {
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "time_step_min": 1e-12,  # a bound which transformers forgets in single steps
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        },
    ),
    "zamba2": (  # a layer with attention ends it, whose weights are shared
        "Zamba2",
        {
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "time_step_min": 1e-12,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "adapter_rank": 4,
            "tie_word_embeddings": False,
        },
    ),
    "mamba2": (  # no attention at all
        "Mamba2",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    ),
    # refused
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "minimax": ("MiniMax", {"layer_types": ["linear_attention", "full_attention"] * 2}),
}


def make(family: str, vocab_size: int) -> PreTrainedModel:
    """A tiny random model of a family in float32; large weights, so that tokens differ."""
    name, fields = (FAMILIES | RECURRENT)[family]
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
    text = "Text" if family in ("gemma3", "qwen3_5") else ""
    config = getattr(transformers, f"{name}{text}Config")(**(sizes | fields), vocab_size=vocab_size)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{'LMHeadModel' if family == 'gpt2' else 'ForCausalLM'}")(
        config
    ).eval()
