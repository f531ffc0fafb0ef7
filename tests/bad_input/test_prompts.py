"""Prompts that are missing, malformed, too long or too few."""

import json
from pathlib import Path

import pytest

from dspark_train.artifacts import Artifact
from tests.tiny_pipeline import (
    Run,
    refused,
    write_prompts,
)


def prompts(tmp_path: Path, content: str | bytes, name: str = "bad.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return f"prompts.source={path}"


def test_prompts_that_are_not_there(tiny_run: Run) -> None:
    refused(tiny_run("prompts.source=/not/here.jsonl"), "prompts.source=/not/here.jsonl", "exist")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["no usable prompt", "it is empty"]),
        ("\n\n", ["no usable prompt", "it is empty"]),
        ("{not json\n[1]\n", ["all 2 rows were dropped", "'malformed': 2", "line 1, 2)"]),
        (b"\xff\xfe\x00\n", ["'malformed': 1"]),
        ('{"question": "why"}\n', ["'no prompt column': 1", "prompts.columns"]),
        ('{"prompt": ""}\n', ["'empty': 1"]),
    ],
)
def test_prompts_without_a_usable_row(
    tiny_run: Run, tmp_path: Path, content: str | bytes, parts: list[str]
) -> None:
    refused(tiny_run(prompts(tmp_path, content)), "bad.jsonl", *parts)


def test_a_file_that_is_no_prompt_file(tiny_run: Run, tmp_path: Path) -> None:
    refused(tiny_run(prompts(tmp_path, "x", "bad.csv")), "bad.csv", ".jsonl or .parquet")
    refused(tiny_run(prompts(tmp_path, "x", "bad.parquet")), "bad.parquet", "not a readable")


def test_malformed_lines_are_counted_and_said(tiny_run: Run, tmp_path: Path) -> None:
    good = write_prompts(tmp_path / "good.jsonl").read_text()
    ended = tiny_run("stages=[rollout]", prompts(tmp_path, "{not json\n" + good))
    assert ended.status == 0
    assert "1 malformed); malformed: line 1" in ended.out
    counts = Artifact.open(tmp_path / "run" / "rollout").counts
    assert counts["malformed_lines"] == [1]
    assert counts["read"] == counts["kept"] + sum(counts["dropped"].values())


def test_prompts_longer_than_the_context_are_dropped_and_said(
    tiny_run: Run, tmp_path: Path
) -> None:
    long = json.dumps({"prompt": "please " * 200}) + "\n"
    good = write_prompts(tmp_path / "good.jsonl").read_text()
    ended = tiny_run("stages=[rollout]", prompts(tmp_path, long + good))
    assert ended.status == 0
    assert "1 too long)" in ended.out
    assert Artifact.open(tmp_path / "run" / "rollout").counts["dropped"]["too_long"] == 1
    refused(tiny_run("stages=[rollout]", prompts(tmp_path, long)), "'too_long': 1", "128 tokens")


def test_too_few_prompts_for_a_split(tiny_run: Run, tmp_path: Path) -> None:
    few = tiny_run(prompts(tmp_path, '{"prompt": "please"}\n'), "prompts.held_out=0.84")
    refused(few, "no prompt to train on", "hold fewer back", "prompts.held_out=0.84")


def test_a_prompt_to_generate_with_that_is_too_long_or_missing(tiny_run_finished: Run) -> None:
    refused(tiny_run_finished("stages=[generate]"), "prompt is empty", "prompt=")
    ended = tiny_run_finished("stages=[generate]", f"prompt='{'please ' * 200}'")
    refused(ended, "the context of target", "128 positions", "shorten")
