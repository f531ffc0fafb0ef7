"""The whole pipeline on the tiny target: what it leaves, what it skips, and what drafters gain."""

import json
import math
from pathlib import Path

import pytest
import torch

from dspark_train.artifacts import OTHERS, SCRATCH, UNFINISHED, Artifact
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.stats import Seconds
from dspark_train.target import Target
from tests import tiny_language
from tests.tiny_pipeline import (
    Run,
    arguments,
    fingerprints,
    rewrite_manifest,
    run_main,
    write_prompts,
)

ROW = {
    "name",
    "sampler",
    "tau",
    "tokens_per_second",
    "speedup_over_plain",
    "acceptance_per_slot",
    "accepted_histogram",
    "verified_per_committed",
    "greedy_identical",
    "near_ties",
    "seconds",
    "drafter_bytes",
    "prompts",
    "tokens",
}


def read_report(run: Path) -> dict:
    return json.loads((run / "bench" / "report.json").read_text())


def test_a_finished_run_does_nothing(tiny_run_finished: Run, tmp_path: Path) -> None:
    before = fingerprints(tmp_path / "run")
    ended = tiny_run_finished()
    assert ended.status == 0, ended
    assert ended.out.count("finished before") == 6
    assert fingerprints(tmp_path / "run") == before


def test_what_a_kill_behind_the_manifest_leaves_is_removed(
    tiny_run_finished: Run, tmp_path: Path
) -> None:
    capture = tmp_path / "run" / "capture"
    whole = sorted(path.name for path in capture.iterdir())
    for name in (UNFINISHED, OTHERS.replace("*", "1")):
        (capture / name).write_text("{}")
    (capture / SCRATCH).mkdir()
    assert tiny_run_finished("stages=[capture]").status == 0
    assert sorted(path.name for path in capture.iterdir()) == whole


def test_a_changed_setting_redoes_what_depends_on_it(
    tiny_run_finished: Run, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before, exported = fingerprints(run), Artifact.open(run / "export").contents
    ended = tiny_run_finished("calibrate.seed=5")
    assert ended.status == 0, ended
    after = fingerprints(run)
    changed = {name for name in before if before[name] != after[name]}
    assert {"calibrate", "export"} <= changed <= {"calibrate", "export", "bench"}
    # a stage is redone because of what it reads, so not if the same came out again
    assert ("bench" in changed) is (Artifact.open(run / "export").contents != exported)
    assert (run / "calibrate.previous" / "manifest.json").exists()


def test_force_redoes_a_finished_stage(tiny_run_finished: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = fingerprints(run)
    ended = tiny_run_finished("force=[export]", "stages=[rollout,export]")
    assert ended.status == 0, ended
    assert ended.out.count("finished before") == 1
    assert fingerprints(run) == before


def test_the_cards_of_a_run_have_what_was_measured(finished_run: Path) -> None:
    """They lie with the benchmark: what was measured is untouched, to the checksum."""
    dspark = next(row for row in read_report(finished_run)["rows"] if row["name"] == "dspark")
    bench, export = (Artifact.open(finished_run / name) for name in ("bench", "export"))
    said = bench.file("cards/native.md").read_text()
    assert f"| greedy | {dspark['tau']:.3f} |" in said
    assert "2 held-out prompts, float32" in said
    before = (export.folder("checkpoint") / "README.md").read_text()
    assert set(before.splitlines()) < set(said.splitlines())


def test_report_has_what_later_benchmarks_have_too(finished_run: Path) -> None:
    report = read_report(finished_run)
    assert set(report) == {"environment", "settings", "rows"}
    assert [row["name"] for row in report["rows"]] == [
        "plain",
        "lookup",
        "dflash",
        "dspark",
        "transformers",
    ]
    for row in report["rows"]:
        assert set(row) >= ROW
        assert row["sampler"] == "greedy"
        assert row["greedy_identical"] is True
        assert set(row["seconds"]) >= set(Seconds._fields)
        assert row["tokens"] > 0
        assert math.isfinite(row["speedup_over_plain"])
    drafted = {row["name"] for row in report["rows"] if row["drafter_bytes"]}
    assert drafted == {"dflash", "dspark"}
    assert (finished_run / "bench" / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_counts_reconcile(finished_run: Path) -> None:
    rollout, capture = (Artifact.open(finished_run / name) for name in ("rollout", "capture"))
    assert rollout.counts["read"] == rollout.counts["kept"] + sum(
        rollout.counts["dropped"].values()
    )
    assert sum(rollout.counts["splits"].values()) == rollout.counts["kept"]
    assert capture.counts["read"] == rollout.counts["responses"]
    assert capture.counts["read"] == capture.counts["kept"] + sum(
        capture.counts["dropped"].values()
    )
    assert capture.counts["documents"] == capture.counts["kept"]


def test_features_are_those_of_a_fresh_forward(finished_run: Path, tiny_target: Target) -> None:
    """Fault 24: taps as captured are taps as served, up to the padding of a batch."""
    from dspark_train.data.store import FeatureStore

    artifact = Artifact.open(finished_run / "capture")
    store, taps = FeatureStore(artifact), tuple(artifact.facts["taps"])
    for number in (0, len(store) - 1):
        document = store.document(number)
        output = tiny_target.forward(document.input_ids[None].long(), taps=taps)
        torch.testing.assert_close(document.features, output.features[0], rtol=1e-4, atol=1e-4)
        kept = output.last_hidden[0, document.label_rows]
        torch.testing.assert_close(document.last_hidden, kept, rtol=1e-4, atol=1e-4)


def test_the_export_is_loaded_from_python(finished_run: Path, tiny_target: Target) -> None:
    checkpoint = finished_run / "export" / "checkpoint"
    decoder = SpeculativeDecoder.from_pretrained(checkpoint, target=tiny_target)
    plain = SpeculativeDecoder.from_pretrained(target=tiny_target, proposer="plain")
    for messages in tiny_language.prompts(3, seed=99):
        result = decoder.generate(messages, 24)
        assert result.tokens == plain.generate(messages, 24).tokens
        assert result.text
    temperatures = decoder.proposer.drafter.config.confidence_temperatures
    assert len(temperatures) == 4


def test_generate_prints_text_and_statistics(tiny_run_finished: Run) -> None:
    ended = tiny_run_finished("stages=[generate]", "prompt=please mend the old boat")
    assert ended.status == 0, ended
    assert "boat" in ended.out
    assert "tokens/s" in ended.out
    assert "cut" not in ended.out


def test_generate_says_what_cut_an_answer(tiny_run_finished: Run) -> None:
    any_token = ("stages=[generate]", "generate.temperature=1e6", "generate.seed=0")
    few = tiny_run_finished(*any_token, "prompt=please", "generate.max_new_tokens=2")
    assert "[cut: generate.max_new_tokens=2]" in few.out, few
    long = f"prompt='{'please ' * 110}'"
    many = tiny_run_finished(*any_token, long, "generate.max_new_tokens=1000000")
    assert "ends at 128 tokens]" in many.out, many


@pytest.mark.slow
def test_the_markov_head_mends_collisions(
    tiny_target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two phrases of two words are equally likely: guessed in parallel, they mix ("of problem").

    The same backbone, once without and once with the sequential head that was trained on it.
    """
    prompts = write_prompts(tmp_path / "prompts.jsonl", 400)
    run = tmp_path / "run"
    overrides = (
        "schedule=staged",
        "rollout.temperature=1.0",
        "rollout.max_new_tokens=48",
        "capture.num_taps=3",
        "drafter.num_hidden_layers=2",
        "drafter.block_size=7",
        "train.epochs=10",
        "train.lr=3e-3",
        "heads.epochs=3",
        "heads.lr=1e-2",
        "bench.prompts=24",
        "bench.max_new_tokens=40",
        "bench.temperatures=[0.0,1.0]",
    )
    ended = run_main(monkeypatch, capfd, arguments(tiny_target_folder, prompts, run, *overrides))
    assert ended.status == 0, ended
    rows = {(row["name"], row["sampler"]): row for row in read_report(run)["rows"]}
    without, with_head = (rows[name, "temperature 1.0"] for name in ("dflash", "dspark"))
    assert without["tau"] > 3.5  # the backbone has learned the language …
    assert min(without["acceptance_per_slot"][:6]) < 0.9  # … and still collides
    assert with_head["tau"] > 1.04 * without["tau"]
    assert rows["dspark", "greedy"]["greedy_identical"] is True


def test_other_contents_upstream_redo_what_was_made_of_them(
    tiny_run_finished: Run, tmp_path: Path
) -> None:
    """The same settings may give other tokens (another machine): settings alone do not tell."""
    rollout = tmp_path / "run" / "rollout"
    shard = rollout / Artifact.open(rollout).facts["shards"][0]
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    rows[0]["response"] = rows[0]["response"][:-1]
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewrite_manifest(rollout, shard.name)
    ended = tiny_run_finished("stages=[rollout,capture]")
    assert ended.status == 0, ended
    assert ended.out.count("finished before") == 1
    assert (tmp_path / "run" / "capture.previous").is_dir()
