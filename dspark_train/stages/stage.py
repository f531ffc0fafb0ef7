"""What a stage is, and what its run reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.config import Config


@dataclass(frozen=True)
class Outcome:
    """What a stage has to say: counts that reconcile, facts for later stages, one line to print."""

    counts: dict[str, Any]
    facts: dict[str, Any]
    line: str


def said(dropped: Mapping[str, int]) -> str:
    """What was dropped and why, to end a line with; nothing if nothing was."""
    reasons = ", ".join(
        f"{count:,} {reason.replace('_', ' ')}" for reason, count in dropped.items()
    )
    return f" (dropped: {reasons})" if reasons else ""


class Stage(Protocol):
    """A module of this package.

    With `SHARED = True` all processes of a run enter `run` together, otherwise rank 0 alone. They
    share the work by `dspark_train.ranks`; only rank 0 may change what the writer keeps account of.
    """

    @staticmethod
    def inputs(config: Config) -> tuple[str, ...]:
        """Names of the stages whose artifacts are read."""

    @staticmethod
    def settings(config: Config) -> dict[str, Any]:
        """Everything of the configuration that determines what is produced."""

    @staticmethod
    def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
        """Produce the artifact's files through `writer`, continuing where it was interrupted."""
