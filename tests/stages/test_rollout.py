"""Rollouts with a drafter, and prompts by the hundred thousand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_train.artifacts import Artifact
from dspark_train.stages.rollout import responses
from tests.tiny_pipeline import Run

READ = """
import resource, sys
from pathlib import Path
from dspark_train.config_data import PromptsConfig
from dspark_train.data.encode import encode_prompts
from dspark_train.target import Target
folder, out, target, *limits = sys.argv[1:]
for limit in limits:
    prompts = PromptsConfig(source=folder, limit=int(limit))
    counts = encode_prompts(prompts, "last", Target.load(target, dtype="float32"), Path(out))
    print(counts["kept"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def rows_of(run: Path) -> list[dict]:
    artifact = Artifact.open(run / "rollout")
    return list(responses(artifact.directory, artifact.facts["shards"]))


def test_a_drafter_changes_nothing_but_the_speed(tiny_run_finished: Run, tmp_path: Path) -> None:
    """Greedy in float32: the same answers; and the calls of the target show that it was used."""
    greedy = ("stages=[rollout]", "rollout.temperature=0", "prompts.limit=12")
    assert tiny_run_finished(*greedy).status == 0
    plain = rows_of(tmp_path / "run")
    checkpoint = tmp_path / "run" / "export" / "checkpoint"
    ended = tiny_run_finished(*greedy, f"rollout.checkpoint={checkpoint}")
    assert ended.status == 0, ended
    artifact = Artifact.open(tmp_path / "run" / "rollout")
    assert artifact.settings["rollout"]["checkpoint"] == str(checkpoint)
    assert rows_of(tmp_path / "run") == plain
    assert any(row["finish_reason"] == "stop" for row in plain)


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_thousand_rows(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    """A dataset is streamed, encoded and written row by row.

    Hashes of 60,000 more rows take about 5 MB. The rows themselves, kept, would take 50 MB.
    """
    folder = tmp_path / "dataset"
    folder.mkdir()
    words = " the old boat" * 25
    with (folder / "train.jsonl").open("w") as file:
        for number in range(100_000):
            file.write(json.dumps({"prompt": f"please count {number}{words}"}) + "\n")

    said = subprocess.run(
        [sys.executable, "-c", READ, folder, tmp_path / "o", tiny_target_folder, "40000", "100000"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    few, peak_few, many, peak_many = map(int, said)
    assert (few, many) == (40_000, 100_000)
    print(f"peak memory: {peak_few} MB at 40,000 rows, {peak_many} MB at 100,000")
    assert peak_many - peak_few < 25
