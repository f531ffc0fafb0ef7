"""Settings of the data: prompts, rollouts and features; see `config.py`."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass(frozen=True)
class PromptsConfig:
    """Where prompts come from and how they are split (by identity, never by row)."""

    source: str = MISSING
    dataset_split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)
    system_prompt: str | None = None
    categories: list[str] | None = None
    limit: int | None = None
    calibration: float = 0.1
    held_out: float = 0.1
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutConfig:
    """How the target answers; `shard_prompts` answers are finished and kept together.

    `turns`: "last" answers the last turn of a conversation, "every" all of them one by one, "given"
    none (the source's own answers are learnt from). With `checkpoint`, a drafter of this target
    drafts the answers; with `endpoint.url`, a server answers.
    """

    turns: str = "last"
    checkpoint: str | None = None
    samples_per_prompt: int = 1
    max_new_tokens: int = 512
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    batch_size: int = 32
    shard_prompts: int = 256
    seed: int = 0


@dataclass(frozen=True)
class EndpointConfig:
    """A server of OpenAI's completions (vLLM, SGLang, llama.cpp) that answers prompts.

    `url` ends before `/completions`. The API key is read from the environment variable `key_env`.
    A request is tried `attempts` times; `wait` seconds are the base of the waiting between them.
    """

    url: str | None = None
    model: str | None = None
    concurrency: int = 32
    attempts: int = 8
    wait: float = 1.0
    timeout: float = 600.0
    key_env: str = "OPENAI_API_KEY"


@dataclass(frozen=True)
class CaptureConfig:
    """Which layers are tapped and how features are kept. `taps` overrides `num_taps`.

    `mode` is "offline" (features are stored) or "online" (the target computes them while training,
    on `device` if that is given). `target_sharding` of online features is "replicated" (every
    process holds the target) or "fsdp2" (its layers are shared out over the processes). `dtype` is
    float32, bfloat16, fp8 or int8. With `batch_tokens=1` every document has a forward pass of its
    own. `plan` only prints what a capture would take; the stage `verify` computes
    `verify_documents` afresh.
    """

    mode: str = "offline"
    device: str | None = None
    target_sharding: str = "replicated"
    plan: bool = False
    drop_degenerate: bool = False
    num_taps: int = 5
    taps: list[int] | None = None
    dtype: str = "bfloat16"
    batch_tokens: int = 4096
    max_length: int = 4096
    shard_mb: int = 512
    verify_documents: int = 8
