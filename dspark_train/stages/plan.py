"""`stages=[capture] capture.plan=true`: what a capture would take. Writes nothing."""

import shutil
import time
from pathlib import Path

from dspark_train import ranks
from dspark_train.artifacts import Artifact
from dspark_train.config import CaptureConfig, Config
from dspark_train.data.encoding import STORED, encode, token_bytes
from dspark_train.data.forward import target_states
from dspark_train.data.layout import batches
from dspark_train.data.spread import spread
from dspark_train.disk import nearest_folder
from dspark_train.stages.capture import Plan, make_plan
from dspark_train.stages.stage import said
from dspark_train.stages.targets import load_target, require_same_target
from dspark_train.target import Target

TIMED_PASSES = 4


def run(config: Config) -> None:
    """Print rows, tokens, bytes and time of the configured capture, and what others would take."""
    c, rollout = config.capture, Artifact.open(Path(config.run_dir) / "rollout")
    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    plan = make_plan(c, rollout, target)
    documents, tokens = plan.documents, sum(plan.documents.lengths)
    supervised = sum(documents.labels) / tokens
    place = nearest_folder(Path(config.run_dir))
    speed, passes = tokens_per_second(c, target, plan)
    hours = tokens / speed / ranks.world_size() / 3600
    print(
        f"capture    plan only, nothing is written: {len(documents):,} documents, "
        f"{tokens:,} tokens, {100 * supervised:.0f} % supervised{said(documents.dropped)}\n"
        f"           {c.mode}, {c.dtype}, taps {list(plan.taps)}: {plan.bytes / tokens:,.0f} bytes "
        f"a token, {said_bytes(plan.bytes)} in {len(plan.shards):,} shards "
        f"({said_bytes(shutil.disk_usage(place).free)} are free)\n"
        f"           about {hours:.2f} h on {ranks.world_size()} process(es), at {speed:,.0f} "
        f"tokens/s each, as timed over {passes} passes\n"
        + table(target.hidden_size, len(plan.taps), tokens, supervised)
    )


def tokens_per_second(c: CaptureConfig, target: Target, plan: Plan) -> tuple[float, int]:
    """Tokens captured in a second, without the writing; and how many passes were timed."""
    every = list(batches(plan.order, plan.documents.lengths, c.batch_tokens))
    chosen = spread(every, TIMED_PASSES)
    tokens = 0
    for batch in (chosen[0], *chosen):  # the first pass only warms up
        rows = [plan.documents.document(n).input_ids for n in batch]
        if batch is chosen[0]:
            tokens, begin = 0, time.perf_counter()
        for features, last_hidden in target_states(target, rows, plan.taps):
            encode(features, c.dtype, len(plan.taps))[0].cpu()
            encode(last_hidden, c.dtype, 1)[0].cpu()
        tokens += sum(len(row) for row in rows)
    return tokens / (time.perf_counter() - begin), len(chosen)


def said_bytes(size: float) -> str:
    """A size for people."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    return f"{size / unit:,.2f} {name}"


def table(hidden_size: int, taps: int, tokens: int, supervised: float) -> str:
    """Bytes a token and gigabytes by dtype and number of taps."""
    columns = sorted({taps, *(n for n in (5, 3, 1) if n < taps)}, reverse=True)
    lines = ["dtype".rjust(19) + "".join(f"{n} taps".rjust(26) for n in columns)]
    for dtype in STORED:
        sizes = [token_bytes(dtype, hidden_size, n, supervised) for n in columns]
        cells = (f"{size:,.0f} B/token {said_bytes(size * tokens)}" for size in sizes)
        lines.append(dtype.rjust(19) + "".join(cell.rjust(26) for cell in cells))
    return "\n".join((*lines, "online".rjust(19) + "nothing is stored".rjust(26)))
