"""Rollouts with a drafter, and prompts by the hundred thousand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark_train.artifacts import Artifact
from dspark_train.stages.rollout import responses
from dspark_train.target import Target
from tests.tiny_pipeline import Run, changed_target

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


def test_a_drafter_changes_nothing_but_the_number_of_passes(
    tiny_run_finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy in float32: the same answers, by fewer passes of the target."""
    passes, forward = [], Target.forward

    def counted(*given: Any, **more: Any) -> Any:
        passes[-1] += 1
        return forward(*given, **more)

    monkeypatch.setattr(Target, "forward", counted)
    checkpoint = tmp_path / "run" / "export" / "checkpoint"
    greedy = ("stages=[rollout]", "rollout.temperature=0", "prompts.limit=12")
    answers = []
    for given in ((), (f"rollout.checkpoint={checkpoint}",)):
        passes.append(0)
        ended = tiny_run_finished(*greedy, *given)
        assert ended.status == 0, ended
        answers.append(rows_of(tmp_path / "run"))
    assert answers[0] == answers[1]
    assert any(row["finish_reason"] == "stop" for row in answers[0])
    assert 0 < passes[1] < passes[0]
    artifact = Artifact.open(tmp_path / "run" / "rollout")
    assert artifact.settings["rollout"]["checkpoint"] == str(checkpoint)


def test_penalties_are_recorded_and_applied(tiny_run: Run, tmp_path: Path) -> None:
    """A presence penalty as large as this lets no token of an answer come twice."""
    for given in ("0", "1000"):
        greedy = ("rollout.temperature=0", f"rollout.presence_penalty={given}", "prompts.limit=6")
        assert tiny_run("stages=[rollout]", *greedy).status == 0
        artifact = Artifact.open(tmp_path / "run" / "rollout")
        assert artifact.settings["rollout"]["presence_penalty"] == float(given)
        answers = [row["response"] for row in rows_of(tmp_path / "run")]
        repeats = sum(len(answer) - len(set(answer)) for answer in answers)
        assert (repeats == 0) == (given == "1000")


def test_several_samples_are_other_answers_to_the_same_prompts(
    tiny_run: Run, tmp_path: Path
) -> None:
    """Each has a seed of its own, which neither shards nor the batch decide."""
    found = []
    given = ("rollout.samples_per_prompt=3", "prompts.limit=20", "rollout.temperature=2")
    for shard, batch in ((40, 32), (7, 3)):
        sizes = (f"rollout.shard_prompts={shard}", f"rollout.batch_size={batch}")
        assert tiny_run("stages=[rollout]", *given, *sizes).status == 0
        found.append(rows_of(tmp_path / "run"))
    assert found[0] == found[1]
    groups = [found[0][i : i + 3] for i in range(0, len(found[0]), 3)]
    assert len(groups) > 10
    for group in groups:
        assert [row["sample"] for row in group] == [0, 1, 2]
        assert len({(row["id"], str(row["prompt"])) for row in group}) == 1
    different = sum(len({str(row["response"]) for row in group}) for group in groups)
    assert different > 2 * len(groups)
    artifact = Artifact.open(tmp_path / "run" / "rollout")
    assert artifact.settings["rollout"]["samples_per_prompt"] == 3


def test_template_arguments_are_applied_and_recorded(
    tiny_run: Run, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """Thinking is switched by the template: another prompt, so other work."""

    def thinking(target: Target) -> None:
        quiet = "{% if enable_thinking is defined and not enable_thinking %}of course {% endif %}"
        target.tokenizer.chat_template += quiet

    folder = changed_target(tiny_target_folder, tmp_path, thinking)
    prompts, artifacts = [], []
    for template in ("{}", "{enable_thinking: false}"):
        given = (f"target.name={folder}", f"prompts.template={template}", "prompts.limit=8")
        assert tiny_run("stages=[rollout]", *given).status == 0
        prompts.append([row["prompt"] for row in rows_of(tmp_path / "run")])
        artifacts.append(Artifact.open(tmp_path / "run" / "rollout"))
    end = Target.load(str(folder), dtype="float32").tokenizer.encode("of course")
    assert prompts[1] == [[*one, *end] for one in prompts[0]]
    assert [one.facts["template"] for one in artifacts] == [{}, {"enable_thinking": False}]
    assert artifacts[0].facts["template_sha256"] == artifacts[1].facts["template_sha256"]
    assert artifacts[0].fingerprint != artifacts[1].fingerprint


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
