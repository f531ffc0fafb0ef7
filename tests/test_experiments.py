"""Published recipes: their numbers, and the drafters that come of them, built without memory.

Sizes of the targets are those of their public configurations; counts are worked out by hand as
`fc + layers x (attention + MLP + norms) + norms + Markov factors + confidence`.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from dspark_train.drafter import Drafter
from dspark_train.stages.train import drafter_config
from dspark_train.target.layers import default_taps
from tests.test_configs import configured

# hidden, layers, heads, key/value heads, head size, MLP, vocabulary, soft-cap
TARGETS = {
    "qwen3_4b": (2560, 36, 32, 8, 128, 9728, 151_936, None),
    "qwen3_8b": (4096, 36, 32, 8, 128, 12_288, 151_936, None),
    "qwen3_14b": (5120, 40, 40, 8, 128, 17_408, 151_936, None),
    # heads of its full layers, which the experiment names; its keys are values
    "gemma4_12b": (3840, 48, 16, 1, 512, 15_360, 262_144, 30.0),
    "smollm2": (576, 30, 9, 3, 64, 1536, 49_152, None),
}


def target(name: str) -> Any:
    """What `drafter_config` reads of a target."""
    hidden, layers, heads, shared, size, mlp, vocabulary, cap = TARGETS[name]
    config = PretrainedConfig(
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=size,
        intermediate_size=mlp,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 1e6},
    )
    return SimpleNamespace(
        model=SimpleNamespace(config=config),
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=vocabulary,
        max_positions=40_960,
        head=SimpleNamespace(facts={"soft_cap": cap}),
        tokenizer=None,
    )


def built(experiment: str, name: str) -> Drafter:
    config, like = configured(f"experiment={experiment}", "drafter.mask_token_id=4"), target(name)
    facts = {"taps": config.capture.taps, "target": {"name": config.target.name}}
    with torch.device("meta"):
        return Drafter(drafter_config(config, like, facts))


@pytest.mark.parametrize(
    ("experiment", "name", "parameters"),
    [
        # 5 x 2560² + 5 x 100,930,816 + 2 x 2560 + 2 x 256 x 151,936 + 2,817
        ("dspark_qwen3_4b", "qwen3_4b", 615_221_249),
        # 5 x 4096² + 5 x 192,946,432 + 2 x 4096 + 2 x 256 x 151,936 + 4,353
        ("dspark_qwen3_8b", "qwen3_8b", 1_126_422_017),
        # 5 x 5120² + 5 x 330,311,936 + 2 x 5120 + 2 x 256 x 151,936 + 5,377
        ("dspark_qwen3_14b", "qwen3_14b", 1_860_438_529),
        # 5 x 3840² + 5 x 241,844,224 + 2 x 3840 + 2 x 256 x 262,144 + 4,097
        ("dspark_gemma4_12b", "gemma4_12b", 1_417_178_625),
        # 5 x 2560² + 5 x 100,930,816 + 2 x 2560
        ("dflash_qwen3_4b", "qwen3_4b", 537_427_200),
        # 5 x 576² + 2 x 3,540,224 + 2 x 576 + 2 x 64 x 49,152 + 641
        ("smollm2_dspark", "smollm2", 15_032_577),
        # 5 x 576² + 2 x 3,540,224 + 2 x 576
        ("smollm2_dflash", "smollm2", 8_740_480),
    ],
)
def test_drafter_of_an_experiment(experiment: str, name: str, parameters: int) -> None:
    hidden, _, heads, shared, size, mlp, vocabulary, cap = TARGETS[name]
    drafter = built(experiment, name)
    found = {key: tuple(p.shape) for key, p in drafter.named_parameters()}
    last = drafter.config.num_hidden_layers - 1
    assert found["fc.weight"] == (hidden, 5 * hidden)
    assert found[f"layers.{last}.self_attn.q_proj.weight"] == (heads * size, hidden)
    assert found[f"layers.{last}.self_attn.k_proj.weight"] == (shared * size, hidden)
    assert found[f"layers.{last}.self_attn.o_proj.weight"] == (hidden, heads * size)
    assert found[f"layers.{last}.self_attn.q_norm.weight"] == (size,)
    assert found[f"layers.{last}.mlp.down_proj.weight"] == (hidden, mlp)
    if "dspark" in experiment:
        rank = drafter.config.markov_rank
        assert found["markov_head.markov_w1.weight"] == (vocabulary, rank)
        assert found["markov_head.markov_w2.weight"] == (vocabulary, rank)
        assert found["confidence_head.proj.weight"] == (1, hidden + rank)
    else:
        assert not [key for key in found if "head" in key.split(".")[0]]
    assert sum(p.numel() for p in drafter.parameters()) == parameters
    assert drafter.config.target["head"]["soft_cap"] == cap


@pytest.mark.parametrize(
    ("experiment", "taps", "layers", "block", "anchors", "epochs", "decay", "mask"),
    [
        ("dspark_qwen3_4b", [1, 9, 17, 25, 33], 5, 7, 512, 10, 4.0, 151_669),
        ("dspark_qwen3_8b", [1, 9, 17, 25, 33], 5, 7, 512, 10, 4.0, 151_669),
        ("dspark_qwen3_14b", [1, 10, 19, 28, 37], 5, 7, 512, 10, 4.0, 151_669),
        ("dspark_gemma4_12b", [5, 17, 29, 41, 46], 5, 7, 512, 10, 4.0, 4),
        ("dflash_qwen3_4b", [1, 9, 17, 25, 33], 5, 16, 512, 6, 7.0, 151_669),
        ("smollm2_dspark", [1, 8, 14, 20, 27], 2, 7, 128, 2, 4.0, None),
        ("smollm2_dflash", [1, 8, 14, 20, 27], 2, 8, 64, 2, 7.0, None),
    ],
)
def test_numbers_of_an_experiment(
    experiment: str,
    taps: list[int],
    layers: int,
    block: int,
    anchors: int,
    epochs: int,
    decay: float,
    mask: int | None,
) -> None:
    config = configured(f"experiment={experiment}")
    d, o, t = config.drafter, config.objective, config.train
    assert config.capture.taps == taps
    assert (d.num_hidden_layers, d.block_size, d.mask_token_id) == (layers, block, mask)
    assert (t.anchors, t.epochs, t.warmup, t.clip) == (anchors, epochs, 0.04, 1.0)
    published = not experiment.startswith("smollm2")
    assert (t.optimiser, t.lr) == (("adamw", 6e-4) if published else ("muon", 3e-3))
    headless = experiment.startswith("dflash")
    assert headless or t.markov_from == ("zero" if published else "bigrams")
    # published in bfloat16; where the hardware does not multiply it, "auto" is float32
    assert t.weight_decay == 0.0
    assert t.precision == ("bf16-mixed" if config.target.dtype == "bfloat16" else "32-true")
    assert o.loss_decay == decay
    expected = (0.1, 0.9, 1.0) if "dspark" in experiment else (1.0, 0.0, 0.0)
    assert (o.ce, o.tv, o.confidence) == expected
    assert d.sample_from_anchor is ("dspark" in experiment)
    if "qwen3" in experiment:
        r = config.rollout
        assert (r.temperature, r.top_p, r.top_k) == (0.7, 0.8, 20)
        assert config.prompts.template == {"enable_thinking": False}
        assert t.batch_documents == 512
        length = 3072 if "dflash" in experiment else 4096
        assert r.max_new_tokens == config.capture.max_length == length


def test_taps_of_qwen3_and_smollm2_follow_the_rule() -> None:
    for experiment, name in (
        ("dspark_qwen3_4b", "qwen3_4b"),
        ("dspark_qwen3_14b", "qwen3_14b"),
        ("smollm2_dspark", "smollm2"),
    ):
        layers = TARGETS[name][1]
        assert configured(f"experiment={experiment}").capture.taps == list(default_taps(layers, 5))
