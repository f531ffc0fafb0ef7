"""Prompts of a bench: held out by the run, or of files that the user names, one a domain."""

import json
from collections.abc import Mapping
from typing import Any

from dspark_train.artifacts import Artifact
from dspark_train.config import Config
from dspark_train.data.prompts import PromptReader
from dspark_train.data.spread import spread
from dspark_train.stages.rollout import PROMPTS, split_prompts
from dspark_train.target import Target


def bench_prompts(
    config: Config, target: Target, inputs: Mapping[str, Artifact]
) -> list[dict[str, Any]]:
    """Rows with `id`, `category` (the domain) and `prompt` (token ids).

    At most `bench.prompts` of the run's held-out ones, or of each file in `bench.sources`, spread
    evenly over its order. What the run has trained or calibrated on is left out.

    Raises:
        ValueError: a source that cannot be read or of which nothing is left.
    """
    b = config.bench
    if not b.sources:
        return split_prompts(inputs["rollout"], "held_out", b.prompts)
    seen = set()
    if "rollout" in inputs:
        with inputs["rollout"].file(PROMPTS).open() as lines:
            known = map(json.loads, lines)
            seen = {row["id"] for row in known if row["split"] != "held_out"}
    rows = []
    for domain, source in b.sources.items():
        p = config.prompts
        reader = PromptReader(
            source,
            columns=p.columns,
            system_prompt=p.system_prompt,
            key=f"bench.sources.{domain}",
        )
        found = [prompt for prompt in reader if prompt.id not in seen]
        if not found:
            raise ValueError(
                f"bench.sources.{domain}={source}: the run has trained on all of its "
                f"{reader.counts['kept']} prompts; give others, or the checkpoint of another run"
            )
        for prompt in spread(found, b.prompts):
            ids = target.encode_chat(prompt.messages, **p.template)
            rows.append({"id": prompt.id, "category": domain, "prompt": ids})
    return rows
