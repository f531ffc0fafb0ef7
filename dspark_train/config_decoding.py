"""Settings of what decodes with a drafter; see `config.py`."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class CalibrateConfig:
    """Decoding traces of calibration prompts, and the temperatures fitted on them."""

    prompts: int = 64
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.7])
    batch_size: int = 16
    seed: int = 0


@dataclass(frozen=True)
class SimulateConfig:
    """Policies under simulated load. `cost_table` null: a curve of the paper's kind."""

    policies: list[str] = field(
        default_factory=lambda: [
            *[f"fixed:{length}" for length in range(8)],
            *["threshold:0.6", "prefix", "capacity", "auto"],
        ]
    )
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16, 64, 128, 256])
    requests: int = 200
    tokens: int = 128
    cost_table: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class BenchConfig:
    """Held-out prompts, decoded by everything side by side, once per temperature.

    `decoders`: some of plain (always: all are compared with it), lookup, causal, dflash, dspark,
    tree, transformers, and its modes transformers_compiled, transformers_lookup,
    transformers_assistant, transformers_dflash; where a number of guesses can be chosen, `lookup:4`
    does, and several may stand side by side; `tree:16` has 16 nodes.
    `assistant` is the smaller model of causal and transformers_assistant, `dflash` the checkpoint
    of dflash and transformers_dflash (null: the one that is decoded with, without its heads).
    `transformers_packed`: its modes once more, on weights packed as ours are. `sources`: prompts
    from files, one per domain, instead of the held-out ones; `prompts` are of each. `rounds`: how
    often everything is run; times are medians.
    """

    prompts: int = 16
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7])
    batches: list[int] = field(default_factory=lambda: [1])
    decoders: list[str] = field(
        default_factory=lambda: ["plain", "lookup", "dflash", "dspark", "transformers"]
    )
    assistant: str | None = None
    dflash: str | None = None
    transformers_packed: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    rounds: int = 1
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True)
class GenerateConfig:
    """One answer on the terminal. `target`: another name for the target the checkpoint records.

    `tree_nodes`: drafts of a tree that a round verifies, 0 for chains; `tree_branches`: children of
    a node at most.
    """

    target: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    proposer: str = "drafter"
    tree_nodes: int = 0
    tree_branches: int = 4
    verdict: str = "rejection"


@dataclass(frozen=True)
class ServeConfig:
    """An OpenAI-compatible server.

    `policy`: fixed, fixed:3, threshold:0.6, prefix, capacity, columns or auto. `cost_table` is read
    if it is there, else measured in about `cost_seconds` and kept there; null measures every time.
    `slots`: drafts of a proposer that has no block. `verdict`: rejection, or matching, with which a
    seed gives the same answer at every load. `target`, `model`: other names for the target.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model: str | None = None
    target: str | None = None
    proposer: str = "drafter"
    policy: str = "auto"
    verdict: str = "rejection"
    rows: int = 16
    slots: int = 8
    chunk: int = 256
    max_waiting: int = 256
    max_positions: int = 65536
    max_new_tokens: int = 2048
    max_prompt_tokens: int = 8192
    max_choices: int = 16
    max_body_bytes: int = 1048576
    timeout: float = 600.0
    shutdown_seconds: float = 30.0
    cost_table: str | None = None
    cost_seconds: float = 2.0


@dataclass(frozen=True)
class BenchServingConfig:
    """Policies under measured load; how it is served is in `serve`.

    Closed loop with `concurrency` users, or open with `rate` requests per second for each of them;
    every run asks for `requests`, or `requests_per_user` for each user if that is more. All answers
    are `max_new_tokens` long. `rounds`: how often everything is run. `seconds`: for all runs
    together; each gets its share, and what is not answered by then is cut off. null: no bound.
    """

    policies: list[str] = field(
        default_factory=lambda: ["fixed:0", "fixed:1", "fixed:2", "fixed:4", "auto"]
    )
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16, 64])
    rate: float | None = None
    rounds: int = 3
    seconds: float | None = None
    requests: int = 8
    requests_per_user: int = 2
    prompts: int = 64
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
