"""All settings: one frozen dataclass per Hydra group, checked by `validation.py` at the door.

Facts that an upstream artifact knows (target, taps, block size, mask token) are settings of the
stage that decides them only; later stages read them from manifests.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING

from dspark_train.config_data import (
    CaptureConfig,
    EndpointConfig,
    PromptsConfig,
    RolloutConfig,
)
from dspark_train.config_decoding import (
    BenchConfig,
    BenchServingConfig,
    CalibrateConfig,
    GenerateConfig,
    ServeConfig,
    SimulateConfig,
)
from dspark_train.config_training import TrainConfig


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model. `name` is a hub id, a folder, or `package:NAME` (weights in a package).

    `dtype` "auto": bfloat16 where the hardware multiplies it, else float32. `pack` lays out weights
    on a CPU for passes over few tokens (`target/cpu.py`). `graphs` decodes at fixed shapes, on CUDA
    as recorded graphs (`decoding/recording.py`); `compile` does too, and compiles what runs at each
    (`decoding/compiling.py`).
    """

    name: str = MISSING
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attn_implementation: str = "auto"
    pack: bool = True
    graphs: bool = False
    compile: bool = False
    cache_dir: str | None = None


@dataclass(frozen=True)
class DrafterSettings:
    """Shape of the drafter. What is null is taken from the target.

    `markov_head_type` null: no sequential head, "selector": DFlash2's over the `selector_top_k`
    best. `conv_kernel_size` taps of DFlash2's convolutions, null: none. `draft_vocab_size`: draft
    only that many tokens, the most frequent ones of the training documents; null: all.
    `sliding_window`: slots of sliding layers see that many positions up to their own (`window_from`
    "anchor": before the anchor); `layer_types` says which layers slide ("sliding_attention",
    "full_attention"), null: all if there is a window. `causal_blocks`: in which layers slots do not
    see later slots ("none", "sliding", "all"). The last six make layers as Gemma 4 has them
    (`drafter=dspark_gemma4`); `rotary_share` of a head's pairs turn, null: all.
    """

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
    conv_kernel_size: int | None = None
    conv_group_size: int = 16
    selector_top_k: int = 16
    draft_vocab_size: int | None = None
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    window_from: str = "slot"
    causal_blocks: str = "none"
    hidden_act: str = "silu"
    sandwich_norms: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    attention_scale: float | None = None
    rotary_share: float | None = None


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the loss terms, which may be mixed freely; `loss_decay` in slots.

    `ce` cross entropy to the token; to the target's distribution: `tv` (L1 norm, not halved), `kl`,
    `reverse_kl`, `log_overlap` (its negative), `blend` (λ KL + (1 - λ) TV, λ = exp(-3 overlap)) and
    `length` (the negative expected accepted length of a block); `confidence` its head's BCE. The
    target's distribution is that at `label_temperature` (1: as published).
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    loss_decay: float = 4.0
    kl: float = 0.0
    reverse_kl: float = 0.0
    log_overlap: float = 0.0
    blend: float = 0.0
    length: float = 0.0
    label_temperature: float = 1.0
    confidence_trains_backbone: bool = True


@dataclass(frozen=True)
class HeadsConfig:
    """Optimisation of the heads on the frozen backbone (schedule staged).

    All else is as in `train`; `anchors` null takes its number. `prefixes` are what the confidence
    head sees before a slot: "teacher" (the target's own tokens), or "sampled": it is fitted once
    more, on drafts, from traces of `prompts` training prompts.
    """

    epochs: int = 1
    lr: float = 1e-3
    anchors: int | None = None
    prefixes: str = "teacher"
    prompts: int = 128
    max_new_tokens: int = 128
    temperature: float = 0.7
    batch_size: int = 16
    seed: int = 1


@dataclass(frozen=True)
class ExportConfig:
    """How checkpoints are written.

    `formats`: some of native, deepspec, vllm, sglang, speculators, dflash, transformers; ours is
    always written. `push_to_hub` is the id of a repository to upload ours to.
    """

    dtype: str = "bfloat16"
    formats: list[str] = field(default_factory=lambda: ["native"])
    push_to_hub: str | None = None


@dataclass(frozen=True)
class ConvertConfig:
    """From any known format to `export.formats`.

    `target` is needed where the checkpoint ships an embedding or an LM head, where the written
    format needs rows of one or says how many layers the target has. `dtype` null keeps that of the
    source.
    """

    target: str | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class BenchTrainingConfig:
    """Cost of training steps at `shapes` (sizes of known targets), by random numbers.

    Each of `rounds` runs every loss in a process of its own for `steps` timed steps. `anchors`: the
    numbers of blocks at which two layers are timed. `loss_memory_mb` is that of the lean loss.
    """

    shapes: list[str] = field(default_factory=lambda: ["smollm2_135m", "qwen3_4b"])
    rounds: int = 3
    steps: int = 3
    anchors: list[int] = field(default_factory=lambda: [32, 64, 128, 256])
    loss_memory_mb: float = 128.0
    threads: int | None = None


@dataclass(frozen=True)
class CertifyConfig:
    """The certificate of losslessness: for which sampler, and how hard it looks.

    The exact law of a round allows `vocabulary` tokens and `length` drafts; `samples` outputs per
    prompt are compared with plain decoding; `rows` requests share a batch.
    """

    proposer: str = "drafter"
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    prompts: int = 4
    max_new_tokens: int = 48
    vocabulary: int = 3
    length: int = 2
    samples: int = 256
    rows: int = 16
    seed: int = 0


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
    instead of the run's own export. `source` and `output` are the checkpoint that `convert` reads
    and the folder that it makes.
    """

    name: str = "default"
    run_dir: str = "runs/${name}"
    stages: list[str] = field(default_factory=list)
    force: list[str] = field(default_factory=list)
    schedule: str = "joint"
    checkpoint: str | None = None
    prompt: str | None = None
    source: str | None = None
    output: str | None = None
    target: TargetConfig = field(default_factory=TargetConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    convert: ConvertConfig = field(default_factory=ConvertConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    bench_training: BenchTrainingConfig = field(default_factory=BenchTrainingConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    bench_serving: BenchServingConfig = field(default_factory=BenchServingConfig)
    certify: CertifyConfig = field(default_factory=CertifyConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)

    @property
    def heads_apart(self) -> bool:
        """Whether the stage `heads` finishes the drafter that the stage `train` leaves."""
        return self.schedule == "staged" or self.heads.prefixes == "sampled"
