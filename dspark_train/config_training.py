"""Settings of training, one group of `config.py`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation of the backbone, and of the heads with it when `schedule` is joint.

    One optimiser step reads `batch_documents` documents, over all processes; each process takes its
    share in micro-batches of at most `micro_documents` (0: all at once), packed into rows of at
    most `row_tokens` tokens (0: one document a row), with at most `anchors` blocks drawn from each.
    `loss_memory_mb` is the budget of the lean loss for logits; null takes the reference loss, which
    holds all of them. `loss_kernel` is "plain" or "triton" (row kernels for CUDA, extra `triton`).
    `attention` is "two_part" (exact, any device), "flex" (FlexAttention, CUDA)
    or "auto" (flex on CUDA, two_part elsewhere); decoding takes two_part always.

    `optimiser` is "muon" for the matrices of the backbone, with AdamW for the rest, or "adamw" for
    all (published recipes; a learning rate of 6e-4 fits it). `lr_parts` gives parts (by
    the beginning of parameter names) a learning rate of their own, `lr_heads` the heads. `ema` is
    the decay of an average of the weights, which is what is then validated and kept (0: none).

    `markov_from` is what the Markov head (vanilla or gated) begins with: "bigrams" of the responses
    (`data/bigrams.py`), or "zero".

    `precision` is Lightning's; "auto": bf16-mixed where `target.dtype=auto` is bfloat16, 32-true
    elsewhere.
    `strategy` of several processes is "ddp" ("auto") or "fsdp2". Validation comes every
    `validate_steps` (null: once an epoch) and decodes `decode_tokens` tokens for each of
    `decode_validation` prompts. `keep` "best" takes the weights with the longest accepted length on
    validation, "last" the last ones. `trainer` goes to Lightning as it is.
    """

    epochs: int = 10
    batch_documents: int = 8
    micro_documents: int = 0
    row_tokens: int = 0
    anchors: int = 512
    optimiser: str = "muon"
    lr: float = 3e-3
    lr_heads: float | None = None
    lr_parts: dict[str, float] = field(default_factory=dict)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup: float = 0.04
    clip: float = 1.0
    ema: float = 0.0
    markov_from: str = "bigrams"
    precision: str = "auto"
    strategy: str = "auto"
    compile: bool = False
    checkpoint_activations: bool = False
    loss_memory_mb: float | None = 128.0
    loss_kernel: str = "plain"
    attention: str = "auto"
    validation: float = 0.02
    validate_steps: int | None = None
    decode_validation: int = 0
    decode_tokens: int = 64
    keep: str = "best"
    checkpoint_minutes: float = 10.0
    workers: int = 0
    seed: int = 42
    trainer: dict[str, Any] = field(default_factory=dict)
