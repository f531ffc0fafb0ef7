"""All settings: one frozen dataclass per Hydra group, validated once, at the door of the pipeline.

Facts that an upstream artifact knows (target, taps, block size, mask token) are settings of the
stage that decides them only; later stages read them from manifests.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from dspark_train.drafter.config import MARKOV_HEADS

DTYPES = ("float32", "bfloat16", "float16")
SCHEDULES = ("joint", "staged")


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model. `name` is a hub id, a folder, or `package:NAME` (weights in a package)."""

    name: str = MISSING
    revision: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    attn_implementation: str = "sdpa"
    cache_dir: str | None = None


@dataclass(frozen=True)
class PromptsConfig:
    """Where prompts come from and how they are split (by identity, never by row)."""

    source: str = MISSING
    dataset_split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    limit: int | None = None
    calibration: float = 0.1
    held_out: float = 0.1
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutConfig:
    """How the target answers; `shard_prompts` answers are finished and kept together."""

    samples_per_prompt: int = 1
    max_new_tokens: int = 512
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    batch_size: int = 32
    shard_prompts: int = 256
    seed: int = 0


@dataclass(frozen=True)
class CaptureConfig:
    """Which layers are tapped and how features are stored. `taps` overrides `num_taps`."""

    num_taps: int = 5
    taps: list[int] | None = None
    dtype: str = "bfloat16"
    batch_tokens: int = 4096
    max_length: int = 4096
    shard_mb: int = 512


@dataclass(frozen=True)
class DrafterSettings:
    """Shape of the drafter. What is null is taken from the target."""

    num_hidden_layers: int = 5
    block_size: int = 7
    sample_from_anchor: bool = True
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    markov_head_type: str | None = "vanilla"
    markov_rank: int = 256
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the loss terms; `loss_decay` in slots."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    loss_decay: float = 4.0
    confidence_trains_backbone: bool = True


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation of the backbone, and of the heads with it when `schedule` is joint.

    One step reads `batch_documents` documents, packed into rows of at most `row_tokens` tokens (0:
    one document a row), with at most `anchors` blocks drawn from each. `loss_memory_mb` is the
    budget of the lean loss for logits; null takes the reference loss, which holds all of them.
    """

    epochs: int = 10
    batch_documents: int = 8
    row_tokens: int = 0
    anchors: int = 512
    accumulate: int = 1
    lr: float = 6e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup: float = 0.04
    clip: float = 1.0
    precision: str = "bf16-mixed"
    loss_memory_mb: float | None = 128.0
    validation: float = 0.02
    checkpoint_minutes: float = 10.0
    workers: int = 0
    seed: int = 42
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HeadsConfig:
    """Optimisation of the heads on the frozen backbone (schedule staged)."""

    epochs: int = 1
    lr: float = 1e-3


@dataclass(frozen=True)
class CalibrateConfig:
    """Decoding traces of calibration prompts, and the temperatures fitted on them."""

    prompts: int = 64
    max_new_tokens: int = 128
    temperature: float = 0.7
    seed: int = 0


@dataclass(frozen=True)
class ExportConfig:
    """How the checkpoint is written; `push_to_hub` is the id of a repository to upload it to."""

    dtype: str = "bfloat16"
    push_to_hub: str | None = None


@dataclass(frozen=True)
class BenchConfig:
    """Held-out prompts, decoded by everything side by side, once per temperature."""

    prompts: int = 16
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7])
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True)
class GenerateConfig:
    """One answer on the terminal. `target`: another name for the target the checkpoint records."""

    target: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    proposer: str = "drafter"


@dataclass(frozen=True)
class LoggerConfig:
    """Training logs. CSV is always written; wandb is `offline`, `online` or null."""

    wandb: str | None = None
    project: str = "dspark_train"
    tensorboard: bool = False


@dataclass(frozen=True)
class Config:
    """Everything. `stages` run in order; those in `force` are redone though finished.

    `schedule` is "joint" (backbone and heads together, the paper's) or "staged" (the backbone,
    then the heads on the frozen backbone). `checkpoint` is what `generate` and `bench` decode with
    instead of the run's own export.
    """

    name: str = "default"
    run_dir: str = "runs/${name}"
    stages: list[str] = field(default_factory=list)
    force: list[str] = field(default_factory=list)
    schedule: str = "joint"
    checkpoint: str | None = None
    prompt: str | None = None
    target: TargetConfig = field(default_factory=TargetConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def validate(config: Config) -> None:
    """Check what can be known before any stage runs.

    Raises:
        ValueError: all problems in one message, each with the key, its value and what is expected.
    """
    t, p, r, c, d, o = (
        config.target,
        config.prompts,
        config.rollout,
        config.capture,
        config.drafter,
        config.objective,
    )
    n = config.train
    checks: list[tuple[bool, str, Any, str]] = [
        (t.dtype in DTYPES, "target.dtype", t.dtype, f"one of {DTYPES}"),
        (c.dtype in ("float32", "bfloat16"), "capture.dtype", c.dtype, "float32 or bfloat16"),
        (config.export.dtype in DTYPES, "export.dtype", config.export.dtype, f"one of {DTYPES}"),
        (0 <= p.calibration < 1, "prompts.calibration", p.calibration, "a share in [0, 1)"),
        (0 <= p.held_out < 1, "prompts.held_out", p.held_out, "a share in [0, 1)"),
        (
            p.calibration + p.held_out < 1,
            "prompts.calibration + prompts.held_out",
            p.calibration + p.held_out,
            "less than 1, so that something is left to train on",
        ),
        (p.limit is None or p.limit > 0, "prompts.limit", p.limit, "a positive number or null"),
        (r.temperature >= 0, "rollout.temperature", r.temperature, "at least 0"),
        (0 < r.top_p <= 1, "rollout.top_p", r.top_p, "a number in (0, 1]"),
        (0 <= r.min_p <= 1, "rollout.min_p", r.min_p, "a number in [0, 1]"),
        (r.top_k >= 0, "rollout.top_k", r.top_k, "at least 0 (0: off)"),
        (
            d.markov_head_type in (None, *MARKOV_HEADS),
            "drafter.markov_head_type",
            d.markov_head_type,
            f"one of {MARKOV_HEADS} or null",
        ),
        (
            d.block_size >= (1 if d.sample_from_anchor else 2),
            "drafter.block_size",
            d.block_size,
            "at least 1 (2 where sample_from_anchor is false, or nothing is proposed)",
        ),
        (
            min(o.ce, o.tv, o.confidence) >= 0 and o.ce + o.tv > 0,
            "objective.(ce, tv, confidence)",
            (o.ce, o.tv, o.confidence),
            "none negative, and one of ce and tv positive",
        ),
        (o.loss_decay > 0, "objective.loss_decay", o.loss_decay, "a positive number of slots"),
        (config.schedule in SCHEDULES, "schedule", config.schedule, f"one of {SCHEDULES}"),
        (
            config.schedule != "staged" or d.markov_head_type or d.enable_confidence_head,
            "schedule",
            config.schedule,
            "joint where the drafter has no heads: there is nothing to train in a second stage",
        ),
        (len(n.betas) == 2, "train.betas", n.betas, "two numbers"),
        (0 <= n.validation < 1, "train.validation", n.validation, "a share in [0, 1)"),
        (0 <= n.warmup < 1, "train.warmup", n.warmup, "a share in [0, 1)"),
        (
            config.logger.wandb in (None, "offline", "online"),
            "logger.wandb",
            config.logger.wandb,
            "offline, online or null",
        ),
    ]
    positive = {
        "rollout.samples_per_prompt": r.samples_per_prompt,
        "rollout.max_new_tokens": r.max_new_tokens,
        "rollout.batch_size": r.batch_size,
        "rollout.shard_prompts": r.shard_prompts,
        "capture.num_taps": c.num_taps,
        "capture.batch_tokens": c.batch_tokens,
        "capture.max_length": c.max_length,
        "capture.shard_mb": c.shard_mb,
        "drafter.num_hidden_layers": d.num_hidden_layers,
        "drafter.markov_rank": d.markov_rank,
        "train.epochs": n.epochs,
        "train.batch_documents": n.batch_documents,
        "train.anchors": n.anchors,
        "train.accumulate": n.accumulate,
        "train.lr": n.lr,
        "heads.epochs": config.heads.epochs,
        "heads.lr": config.heads.lr,
        "calibrate.prompts": config.calibrate.prompts,
        "calibrate.max_new_tokens": config.calibrate.max_new_tokens,
        "bench.prompts": config.bench.prompts,
        "bench.max_new_tokens": config.bench.max_new_tokens,
        "generate.max_new_tokens": config.generate.max_new_tokens,
    }
    checks += [(value > 0, key, value, "a positive number") for key, value in positive.items()]
    problems = [
        f"{key}={value}: expected {expected}" for ok, key, value, expected in checks if not ok
    ]
    if problems:
        raise ValueError("settings:\n  " + "\n  ".join(problems))
