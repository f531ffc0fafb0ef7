"""Model cards of a run's checkpoints with what the benchmark measured.

An export is finished before it is measured, and its checksums stand for what was measured. So these
cards lie with the benchmark, and take the place of the README.md of the checkpoint that is given
away: `export.push_to_hub` uploads that of our own format.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.formats import load_config
from dspark_train.formats.card import Measured, Story, card
from dspark_train.stages.export import STORY

# rows of a benchmark that are the drafter with all it has; the second where it has no heads
DRAFTERS = ("dspark", "dflash")


def measured(report: Mapping[str, Any]) -> list[Measured]:
    """Rows of a card's table of accepted lengths."""
    rows, env = report["rows"], report["environment"]
    name = next(name for name in DRAFTERS if any(row["name"] == name for row in rows))
    return [
        Measured(
            f"{row['prompts']} held-out prompts, {env['dtype']}, {env['machine']}: "
            f"{row['speedup_over_plain']:.2f} x plain",
            row["sampler"],
            row["tau"],
            row["acceptance_per_slot"],
        )
        for row in rows
        if row["name"] == name
    ]


def write_cards(writer: ArtifactWriter, export: Artifact, report: Mapping[str, Any]) -> str:
    """Write `cards/NAME.md` for every format of an export; returns the place of our own's."""
    told = json.loads(export.file(STORY).read_text())
    before = [Measured(**row) for row in told.pop("measured")]
    story = replace(Story(**told), measured=[*measured(report), *before])
    config = load_config(export.folder(export.facts["checkpoint"]))
    for name in export.facts["formats"]:
        writer.write(place_of(name), card(name, config, story).encode())
    return place_of("native")


def place_of(name: str) -> str:
    """Where the card of a format lies inside the benchmark's artifact."""
    return f"cards/{name}.md"
