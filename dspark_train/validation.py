"""The door of the pipeline: everything about the settings that can be known before it runs."""

from collections.abc import Iterator
from math import inf
from typing import Any, get_args

from dspark_train import ranks
from dspark_train.config import Config, GenerateConfig, RolloutConfig
from dspark_train.decoding.loading import ProposerName
from dspark_train.decoding.proposers.tree import MOST_NODES
from dspark_train.decoding.sampling import VerdictName
from dspark_train.decoding.scheduler import POLICIES, is_policy
from dspark_train.formats import FORMATS
from dspark_train.validation_bench import bench_checks
from dspark_train.validation_drafter import drafter_checks

DTYPES = ("float32", "bfloat16", "float16")
STORED = ("float32", "bfloat16", "fp8", "int8")
MODES = ("offline", "online")
KERNELS = ("plain", "triton")
ATTENTION = ("auto", "two_part", "flex")
STEP_SHAPES = ("smollm2_135m", "qwen3_4b")  # those of training/step_cost.py
OPTIMISERS = ("adamw", "muon")
MARKOV_FROM = ("bigrams", "zero")
STRATEGIES = ("auto", "ddp", "fsdp2")
KEPT = ("best", "last")
TURNS = ("last", "every", "given")
SCHEDULES = ("joint", "staged")
PREFIXES = ("teacher", "sampled")
PROPOSERS = get_args(ProposerName)
VERDICTS = get_args(VerdictName)

# whether it is right, the key, its value, what is expected
Check = tuple[bool, str, Any, str]


def validate(config: Config) -> None:
    """Check what can be known before any stage runs.

    Raises:
        ValueError: all problems in one message, each with the key, its value and what is expected.
    """
    problems = [
        f"{key}={value}: expected {expected}"
        for group in (_data, _drafter, _training, _sharing, _launching, _decoding)
        for ok, key, value, expected in group(config)
        if not ok
    ]
    if problems:
        raise ValueError("settings:\n  " + "\n  ".join(problems))


def _data(config: Config) -> Iterator[Check]:
    t, p, r, c = config.target, config.prompts, config.rollout, config.capture
    yield t.dtype in ("auto", *DTYPES), "target.dtype", t.dtype, f"one of {('auto', *DTYPES)}"
    yield bool(p.source), "prompts.source", p.source, "a file, a folder or a dataset's name"
    yield 0 <= p.calibration < 1, "prompts.calibration", p.calibration, "a share in [0, 1)"
    yield 0 <= p.held_out < 1, "prompts.held_out", p.held_out, "a share in [0, 1)"
    shares = p.calibration + p.held_out
    expected = "less than 1, so that something is left to train on"
    yield shares < 1, "prompts.calibration + prompts.held_out", shares, expected
    yield p.limit is None or p.limit > 0, "prompts.limit", p.limit, "a positive number or null"
    yield from _sampler("rollout", r)
    yield 0 <= r.min_p <= 1, "rollout.min_p", r.min_p, "a number in [0, 1]"
    yield from _positive(
        "rollout", r, "samples_per_prompt", "max_new_tokens", "batch_size", "shard_prompts"
    )
    yield r.turns in TURNS, "rollout.turns", r.turns, f"one of {TURNS}"
    penalty = r.repetition_penalty
    yield penalty > 0, "rollout.repetition_penalty", penalty, "a positive number (1: off)"
    yield from _answering(config)
    yield c.dtype in STORED, "capture.dtype", c.dtype, f"one of {STORED}"
    yield c.mode in MODES, "capture.mode", c.mode, f"one of {MODES}"
    ordered = c.taps is None or (c.taps == sorted(set(c.taps)) and min(c.taps, default=-1) >= 0)
    yield ordered, "capture.taps", c.taps, "null, or layers from 0 on in ascending order"
    yield from _positive(
        "capture", c, "num_taps", "batch_tokens", "max_length", "shard_mb", "verify_documents"
    )


def _answering(config: Config) -> Iterator[Check]:
    r, e = config.rollout, config.endpoint
    one = not (e.url and r.checkpoint)
    yield one, "endpoint.url", e.url, "null where rollout.checkpoint is given: one of them answers"
    yield not e.url or bool(e.model), "endpoint.model", e.model, "the name the server knows it by"
    yield from _positive("endpoint", e, "concurrency", "attempts", "timeout")
    yield e.wait >= 0, "endpoint.wait", e.wait, "seconds, at least 0"
    answered = r.turns != "given" or not (e.url or r.checkpoint or r.samples_per_prompt > 1)
    expected = "last or every where endpoint.url, rollout.checkpoint or several samples are given"
    yield answered, "rollout.turns", r.turns, expected


def _drafter(config: Config) -> Iterator[Check]:
    d = config.drafter
    yield from _positive("drafter", d, "num_hidden_layers", "markov_rank")
    yield from _positive("drafter", d, "conv_group_size", "selector_top_k")
    yield from drafter_checks(d)
    schedule, has_heads = config.schedule, d.markov_head_type or d.enable_confidence_head
    yield schedule in SCHEDULES, "schedule", schedule, f"one of {SCHEDULES}"
    expected = "joint where the drafter has no heads: there is nothing to train in a second stage"
    yield schedule != "staged" or bool(has_heads), "schedule", schedule, expected


def _training(config: Config) -> Iterator[Check]:
    o, n, wandb = config.objective, config.train, config.logger.wandb
    distances = ("ce", "tv", "kl", "reverse_kl", "log_overlap", "blend", "length")
    for key in (*distances, "confidence"):
        yield getattr(o, key) >= 0, f"objective.{key}", getattr(o, key), "at least 0"
    weights, expected = tuple(getattr(o, key) for key in distances), "one of them positive"
    yield any(weights), f"objective.({', '.join(distances)})", weights, expected
    yield o.loss_decay > 0, "objective.loss_decay", o.loss_decay, "a positive number of slots"
    heat = o.label_temperature
    yield 0 < heat < inf, "objective.label_temperature", heat, "a positive number"
    yield from _positive(
        "train",
        n,
        "epochs",
        "batch_documents",
        "anchors",
        "lr",
        "checkpoint_minutes",
        "decode_tokens",
    )
    h = config.heads
    yield from _positive("heads", h, "epochs", "lr", "prompts", "max_new_tokens", "batch_size")
    yield h.temperature >= 0, "heads.temperature", h.temperature, "at least 0"
    yield h.prefixes in PREFIXES, "heads.prefixes", h.prefixes, f"one of {PREFIXES}"
    possible = h.prefixes != "sampled" or config.drafter.enable_confidence_head
    expected = "teacher where the drafter has no confidence head"
    yield possible, "heads.prefixes", h.prefixes, expected
    for key in (
        "row_tokens",
        "micro_documents",
        "weight_decay",
        "clip",
        "workers",
        "decode_validation",
    ):
        yield getattr(n, key) >= 0, f"train.{key}", getattr(n, key), "at least 0"
    betas = len(n.betas) == 2 and all(0 <= beta < 1 for beta in n.betas)
    yield betas, "train.betas", n.betas, "two numbers in [0, 1)"
    for key in ("validation", "warmup", "ema"):
        yield 0 <= getattr(n, key) < 1, f"train.{key}", getattr(n, key), "a share in [0, 1)"
    choices = {
        "optimiser": OPTIMISERS,
        "markov_from": MARKOV_FROM,
        "strategy": STRATEGIES,
        "keep": KEPT,
    }
    for key, known in choices.items():
        yield getattr(n, key) in known, f"train.{key}", getattr(n, key), f"one of {known}"
    rates = {"lr_heads": n.lr_heads, **{f"lr_parts.{part}": r for part, r in n.lr_parts.items()}}
    for key, rate in rates.items():
        yield rate is None or rate > 0, f"train.{key}", rate, "a positive number"
    every, expected = n.validate_steps, "a positive number of steps, or null for once an epoch"
    yield every is None or every > 0, "train.validate_steps", every, expected
    expected = "32-true, bf16-mixed or 16-mixed: masters and moments stay in float32"
    narrow = n.precision.endswith("-true") and n.precision not in ("32-true", "64-true")
    yield not narrow, "train.precision", n.precision, expected
    memory = n.loss_memory_mb
    expected = "a positive number, or null for the reference loss"
    yield memory is None or memory > 0, "train.loss_memory_mb", memory, expected
    yield n.loss_kernel in KERNELS, "train.loss_kernel", n.loss_kernel, f"one of {KERNELS}"
    yield n.attention in ATTENTION, "train.attention", n.attention, f"one of {ATTENTION}"
    yield wandb in (None, "offline", "online"), "logger.wandb", wandb, "offline, online or null"


def _sharing(config: Config) -> Iterator[Check]:
    known, sharding = ("replicated", "fsdp2"), config.capture.target_sharding
    yield sharding in known, "capture.target_sharding", sharding, f"one of {known}"
    decodes = config.train.decode_validation
    expected = "0 where capture.target_sharding=fsdp2: one process alone cannot decode then"
    whole = sharding == "replicated" or not decodes
    yield whole, "train.decode_validation", decodes, expected


def _launching(config: Config) -> Iterator[Check]:
    """Fault 51: the launcher and the trainer must agree on the number of processes."""
    given = config.train.trainer
    asked = ranks.count(given.get("devices")) * given.get("num_nodes", 1)
    key = f"train.trainer.devices={given.get('devices')} on num_nodes={given.get('num_nodes', 1)}"
    if ranks.launched():
        started = ranks.world_size()
        agreed = not {"devices", "num_nodes"} & set(given) or asked == started
        expected = (
            f"the {started} processes that the launcher started (WORLD_SIZE={started}): leave "
            "both settings out, or start as many"
        )
        yield agreed, key, f"{asked} processes", expected
    else:
        expected = "one machine where no launcher is used; start several by torchrun or accelerate"
        yield (
            given.get("num_nodes", 1) == 1,
            "train.trainer.num_nodes",
            given.get("num_nodes"),
            expected,
        )


def _decoding(config: Config) -> Iterator[Check]:
    c, e, b, g = config.calibrate, config.export, config.bench, config.generate
    yield from _positive("calibrate", c, "prompts", "max_new_tokens", "batch_size")
    hottest = bool(c.temperatures) and min(c.temperatures) >= 0
    yield hottest, "calibrate.temperatures", c.temperatures, "at least one, none below 0"
    yield e.dtype in DTYPES, "export.dtype", e.dtype, f"one of {DTYPES}"
    known = bool(e.formats) and set(e.formats) <= set(FORMATS)
    ok = known and len(set(e.formats)) == len(e.formats)
    t = config.convert.dtype
    yield t in (None, *DTYPES), "convert.dtype", t, f"one of {DTYPES} or null"
    yield ok, "export.formats", e.formats, f"some of {list(FORMATS)}, each once"
    yield from _positive("bench", b, "prompts", "max_new_tokens", "rounds")
    yield from bench_checks(b)
    m = config.simulate
    yield from _positive("simulate", m, "requests", "tokens")
    loads = bool(m.concurrency) and min(m.concurrency) > 0
    yield loads, "simulate.concurrency", m.concurrency, "at least one, all positive"
    yield _policies(m.policies), "simulate.policies", m.policies, f"each once, of {POLICIES}"
    t = config.bench_training
    yield from _positive("bench_training", t, "rounds", "steps", "loss_memory_mb")
    known = not set(t.shapes) - set(STEP_SHAPES)
    yield known, "bench_training.shapes", t.shapes, f"some of {STEP_SHAPES}"
    positive = all(count > 0 for count in t.anchors)
    yield positive, "bench_training.anchors", t.anchors, "positive numbers"
    yield (
        t.threads is None or t.threads > 0,
        "bench_training.threads",
        t.threads,
        "positive, or null",
    )
    w = config.bench_serving
    sizes = ("rounds", "requests", "requests_per_user", "prompts", "max_new_tokens")
    yield from _positive("bench_serving", w, *sizes)
    loads = bool(w.concurrency) and min(w.concurrency) > 0
    yield loads, "bench_serving.concurrency", w.concurrency, "at least one, all positive"
    yield _policies(w.policies), "bench_serving.policies", w.policies, f"each once, of {POLICIES}"
    expected = "requests per second, or null for a closed loop"
    yield w.rate is None or w.rate > 0, "bench_serving.rate", w.rate, expected
    expected = "seconds for all runs together, or null"
    yield w.seconds is None or w.seconds > 0, "bench_serving.seconds", w.seconds, expected
    yield w.temperature >= 0, "bench_serving.temperature", w.temperature, "at least 0"
    v = config.serve
    yield is_policy(v.policy), "serve.policy", v.policy, f"one of {POLICIES}"
    sizes = ("rows", "slots", "chunk", "max_waiting", "max_positions", "max_new_tokens")
    more = ("max_prompt_tokens", "max_choices", "max_body_bytes", "timeout", "shutdown_seconds")
    yield from _positive("serve", v, *sizes, *more, "cost_seconds")
    yield 0 < v.port < 65536, "serve.port", v.port, "a number from 1 to 65535"
    yield v.proposer in PROPOSERS, "serve.proposer", v.proposer, f"one of {PROPOSERS}"
    expected = "a key that is not empty, or null for none"
    yield v.api_key != "", "serve.api_key", v.api_key, expected
    yield from _sampler("generate", g)
    yield from _positive("generate", g, "max_new_tokens")
    yield g.proposer in PROPOSERS, "generate.proposer", g.proposer, f"one of {PROPOSERS}"
    yield from _tree("generate", g)
    expected = "0, since only drafters draft trees, or generate.proposer=drafter"
    grows = g.proposer.startswith("drafter") or not g.tree_nodes
    yield grows, "generate.tree_nodes", g.tree_nodes, expected
    yield g.verdict in VERDICTS, "generate.verdict", g.verdict, f"one of {VERDICTS}"
    yield v.verdict in VERDICTS, "serve.verdict", v.verdict, f"one of {VERDICTS}"
    y = config.certify
    yield from _sampler("certify", y)
    yield from _positive(
        "certify", y, "prompts", "max_new_tokens", "vocabulary", "length", "samples", "rows"
    )
    expected = "at least 2 tokens, or every draft is right"
    yield y.vocabulary != 1, "certify.vocabulary", y.vocabulary, expected
    yield y.proposer in PROPOSERS, "certify.proposer", y.proposer, f"one of {PROPOSERS}"


def _sampler(name: str, s: RolloutConfig | GenerateConfig) -> Iterator[Check]:
    yield s.temperature >= 0, f"{name}.temperature", s.temperature, "at least 0 (0: greedy)"
    yield 0 < s.top_p <= 1, f"{name}.top_p", s.top_p, "a number in (0, 1]"
    yield s.top_k >= 0, f"{name}.top_k", s.top_k, "at least 0 (0: off)"


def _tree(name: str, s: GenerateConfig) -> Iterator[Check]:
    expected = f"from 0 (no trees) to {MOST_NODES}"
    yield 0 <= s.tree_nodes <= MOST_NODES, f"{name}.tree_nodes", s.tree_nodes, expected
    few = 1 <= s.tree_branches <= MOST_NODES
    yield few, f"{name}.tree_branches", s.tree_branches, f"from 1 to {MOST_NODES}"


def _policies(names: list[str]) -> bool:
    return bool(names) and len(set(names)) == len(names) and all(map(is_policy, names))


def _positive(name: str, group: Any, *keys: str) -> Iterator[Check]:
    for key in keys:
        value = getattr(group, key)
        yield value > 0, f"{name}.{key}", value, "a positive number"
