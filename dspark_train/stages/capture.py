"""responses -> target features: one frozen forward, taps on a few layers.

Shards are planned from the lengths alone, before anything is computed. Each is the work of one
process and is finished, or not there: so processes share the shards out, and a run that was killed
continues, with the same bytes in the end. With `capture.mode=online` nothing is stored: the stage
settles what training then computes by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from dspark_train import ranks
from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import CaptureConfig, Config
from dspark_train.data.forward import target_states
from dspark_train.data.layout import batches, document_bytes, plan_shards
from dspark_train.data.rollouts import RolloutDocuments
from dspark_train.data.writer import FeatureWriter, shard_name
from dspark_train.disk import check_space
from dspark_train.stages.stage import Outcome, said
from dspark_train.stages.targets import load_target, require_same_target, target_settings
from dspark_train.target import Target
from dspark_train.target.layers import default_taps, validate_taps

SHARED = True
# what does not decide what is captured
OPERATIONAL = ("plan", "device", "target_sharding", "verify_documents")


def inputs(config: Config) -> tuple[str, ...]:
    return ("rollout",)


def settings(config: Config) -> dict[str, Any]:
    deciding = {k: v for k, v in asdict(config.capture).items() if k not in OPERATIONAL}
    return {"target": target_settings(config), "capture": deciding}


@dataclass(frozen=True)
class Plan:
    """What is captured: documents, which of them share a shard, and what that takes.

    Attributes:
        documents: of the rollout.
        shards: document numbers of each shard, in order.
        taps: tapped layers.
        bytes: of the whole store, without headers.
    """

    documents: RolloutDocuments
    shards: list[list[int]]
    taps: tuple[int, ...]
    bytes: int

    @property
    def order(self) -> list[int]:
        """Document numbers in the order of the store."""
        return [number for shard in self.shards for number in shard]


def make_plan(c: CaptureConfig, rollout: Artifact, target: Target) -> Plan:
    """Lay out the store of a rollout.

    Raises:
        ValueError: damaged rollouts, none to learn from, or taps that the target does not have.
    """
    taps = (
        default_taps(target.num_layers, c.num_taps)
        if c.taps is None
        else validate_taps(c.taps, target.num_layers)
    )
    documents = RolloutDocuments(
        rollout, max_length=c.max_length, drop_degenerate=c.drop_degenerate
    )
    sizes = [
        document_bytes(
            tokens, labels, dtype=c.dtype, hidden_size=target.hidden_size, taps=len(taps)
        )
        for tokens, labels in zip(documents.lengths, documents.labels, strict=True)
    ]
    shards = plan_shards(documents.lengths, sizes, c.shard_mb * 2**20)
    return Plan(documents, shards, taps, sum(sizes))


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Store the features of every response that has something to supervise."""
    rollout, c = inputs["rollout"], config.capture
    target = load_target(config)
    require_same_target(target, rollout.facts["target"], str(rollout.directory))
    plan = make_plan(c, rollout, target)
    documents = plan.documents
    if c.mode == "offline":
        check_space(writer.directory, plan.bytes, "the feature store")
        writer.begin_shared()
        write_store(c, target, plan, writer)
        ranks.wait()
    counts = {
        "read": documents.read,
        "kept": documents.kept,
        "dropped": dict(documents.dropped),
        "documents": len(documents),
        "tokens": sum(documents.lengths),
        "label_rows": sum(documents.labels),
        "shards": len(plan.shards) if c.mode == "offline" else 0,
    }
    stored = [writer.path(shard_name(i)).stat().st_size for i in range(counts["shards"])]
    counts["bytes"] = sum(stored)
    size = f"{counts['bytes'] / 1e6:,.0f} MB of {c.dtype}" if stored else "computed while training"
    return Outcome(
        counts=counts,
        facts={
            "target": rollout.facts["target"],
            "mode": c.mode,
            "taps": list(plan.taps),
            "dtype": c.dtype,
            "hidden_size": target.hidden_size,
            "bytes_per_token": counts["bytes"] / counts["tokens"],
        },
        line=f"{len(documents):,} documents, {counts['tokens']:,} tokens, {size}, "
        f"taps {list(plan.taps)}" + said(documents.dropped),
    )


def write_store(c: CaptureConfig, target: Target, plan: Plan, writer: ArtifactWriter) -> None:
    """Compute and write this process's share of the shards, those apart that are there."""
    mine = ranks.share(range(len(plan.shards)))
    documents, left = plan.documents, [n for n in mine if not writer.has(shard_name(n))]
    total = sum(len(plan.shards[n]) for n in mine)
    begun = total - sum(len(plan.shards[n]) for n in left)
    bar = tqdm(
        total=total,
        initial=begun,
        desc="capture",
        unit="doc",
        mininterval=1,
        disable=not ranks.first(),
    )
    with bar, FeatureWriter(writer, dtype=c.dtype, taps=len(plan.taps)) as store:
        for number in left:
            members = plan.shards[number]
            store.begin(
                number,
                [documents.lengths[n] for n in members],
                [documents.labels[n] for n in members],
            )
            for add in captured(target, documents, members, plan.taps, c.batch_tokens):
                store.add(*add)
                bar.update()


def captured(
    target: Target,
    documents: RolloutDocuments,
    members: list[int],
    taps: tuple[int, ...],
    batch_tokens: int,
) -> Iterator[tuple[Any, ...]]:
    """What `FeatureWriter.add` takes, for each of the documents `members`, in order."""
    for batch in batches(members, documents.lengths, batch_tokens):
        rows = [documents.document(n) for n in batch]
        states = target_states(target, [row.input_ids for row in rows], taps)
        for row, (features, last_hidden) in zip(rows, states, strict=True):
            yield row.identity, row.input_ids, row.loss_mask, features, last_hidden
