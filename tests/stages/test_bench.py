"""The bench: everything side by side, on prompts of the user's own, and what it says of itself."""

import json
from pathlib import Path

import pytest

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.loading import block_proposer
from dspark_train.decoding.stats import DecodingStats, Round, Seconds
from dspark_train.decoding.verdicts import decide
from dspark_train.stages.bench_decoders import ours
from dspark_train.stages.bench_model import speed_model
from dspark_train.stages.bench_rows import context_bucket
from dspark_train.stages.round_picture import LANES, record_round
from dspark_train.target import Target
from tests import tiny_language
from tests.random_drafter import make_drafter
from tests.tiny_pipeline import Run, refused

DECODERS = ["plain", "lookup:2", "causal:2", "dflash", "dspark", "tree:6", "transformers"]
ASSISTED = ["transformers_lookup:3", "transformers_assistant:2", "transformers_dflash"]


def test_everything_side_by_side(
    tiny_run_finished: Run, tiny_target: Target, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """Two files of prompts, two batch sizes, a DFlash drafter beside the run's own."""
    make_drafter(tiny_target, 4, False, None).save_pretrained(tmp_path / "dflash")
    sources = {}
    for domain, seed in (("one", 77), ("two", 78)):
        path = tmp_path / f"{domain}.jsonl"
        texts = [messages[-1]["content"] for messages in tiny_language.prompts(3, seed=seed)]
        path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
        sources[domain] = str(path)
    ended = tiny_run_finished(
        "stages=[bench]",
        f"checkpoint={tmp_path}/run/export/checkpoint",
        f"+bench.sources={{one: {sources['one']}, two: {sources['two']}}}",
        f"bench.decoders=[{','.join(DECODERS + ASSISTED)}]",
        f"bench.assistant={tiny_target_folder}",
        f"bench.dflash={tmp_path / 'dflash'}",
        "bench.batches=[1,2]",
        "bench.rounds=2",
        "bench.max_new_tokens=6",
    )
    assert ended.status == 0, ended
    report = json.loads((tmp_path / "run" / "bench" / "report.json").read_text())
    rows = report["rows"]
    # assisted generation of transformers takes one prompt at a time
    assert [r["name"] for r in rows if r["batch"] == 1] == DECODERS + ASSISTED
    assert [r["name"] for r in rows if r["batch"] == 2] == DECODERS
    for row in rows:
        assert row["greedy_identical"], row
        assert row["prompts"] == 4
        assert set(row["by"]["domain"]) == {"one", "two"}
        ours = not row["name"].startswith("transformers")
        assert (row["speed_model"] is not None) is ours
        if ours:
            assert row["target_cache_bytes_per_token"] > 0
            measured = row["speed_model"]["measured"]
            assert row["outside_models"] < 1
            assert measured > 0
    named = {row["name"]: row for row in rows if row["batch"] == 1}
    assert named["causal:2"]["tau"] == 2.5  # the assistant is the target itself
    assert named["transformers_assistant:2"]["tau"] >= 2
    assert named["dspark"]["seconds"]["walk"] > 0 == named["lookup:2"]["seconds"]["walk"]
    assert named["dspark"]["drafter_cache_bytes_per_token"] > 0
    assert "by domain" in ended.out
    assert (tmp_path / "run" / "bench" / "round.png").read_bytes()[:4] == b"\x89PNG"
    assert {(gain["chain"], gain["batch"]) for gain in report["trees"]} == {
        ("dspark", 1),
        ("dspark", 2),
    }
    assert "extra verified node" in ended.out


@pytest.mark.slow
def test_compiled_beside_compiled(tiny_run_finished: Run, tmp_path: Path) -> None:
    """Both sides; what compiles at first is decoded once before anything is timed."""
    ended = tiny_run_finished(
        "stages=[bench]",
        "target.compile=true",
        "bench.decoders=[plain,dspark,transformers,transformers_compiled]",
        "bench.transformers_packed=true",
        "bench.prompts=2",
        "bench.max_new_tokens=6",
        "bench.temperatures=[0.0]",
    )
    assert ended.status == 0, ended
    report = json.loads((tmp_path / "run" / "bench" / "report.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert all(row["greedy_identical"] and row["prompts"] == 2 for row in rows.values())
    assert rows["transformers_compiled"]["tau"] == rows["transformers"]["tau"] == 1


def test_caches_are_counted_for_one_row(random_target) -> None:
    """With graphs the rows of an earlier batch are still there."""
    target = random_target()
    found = []
    for target.graphs in (False, True):
        drafter = make_drafter(target)
        decoder = ours("dspark", target, block_proposer(drafter, target), 4)
        decoder.decode([[1, 2], [3], [0]], 0.0, [0, 1, 2])
        found.append(decoder.memory())
    assert found[0] == found[1]
    assert (
        found[0]["target_cache_bytes_per_token"] == 2 * 3 * 8 * 4
    )  # K and V, layers, width, bytes


def test_a_recorded_round_has_all_its_parts_and_leaves_nothing_behind(random_target) -> None:
    target = random_target()
    decoder = SpeculativeDecoder.with_drafter(target, make_drafter(target))
    spans = record_round(decoder, [1, 2, 3], 12)
    names = [name for name, _, _ in spans]
    assert set(names) == {*LANES, "round"}
    assert names.count("target") == target.num_layers
    assert names.count("head walk") == 4
    (whole,) = [end for name, _, end in spans if name == "round"]
    assert 0 < sum(end - begin for name, begin, end in spans if name != "round") < whole
    assert "forward" not in vars(target.layers[0])
    assert "step" not in vars(decoder.engine)
    assert decoder.engine.decide is decide


def test_bad_settings(tiny_run_finished: Run) -> None:
    def given(*overrides: str) -> None:
        ended = tiny_run_finished("stages=[bench]", *(f"bench.{one}" for one in overrides))
        refused(ended, overrides[0].split("=")[0], lines=3)

    given("decoders=[plain,best]")
    given("decoders=[lookup]")
    given("decoders=[plain,dspark:2]")
    given("assistant=null", "decoders=[plain,causal]")
    given("batches=[0]")
    given("batches=[64]")
    given("batches=[1,1]")
    given("temperatures=[0,0.0]")
    given("decoders=[plain,tree:100000]")
    given("decoders=[plain,'lookup:²']")
    given("sources={mine: /not/here.jsonl}")
    given("decoders=[plain,transformers_dflash]")


def test_an_assistant_with_other_tokens(
    tiny_run_finished: Run, random_target, save_target, tmp_path: Path
) -> None:
    folder = save_target(random_target(vocab_size=90))
    named = f"bench.assistant={folder}"
    for name in ("causal", "transformers_assistant"):
        ended = tiny_run_finished("stages=[bench]", f"bench.decoders=[plain,{name}]", named)
        refused(ended, named, "another vocabulary", "same tokenizer")


def test_a_source_without_prompts_is_named(tiny_run_finished: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"text": "hi"}\n')
    ended = tiny_run_finished("stages=[bench]", f"bench.sources={{mine: {tmp_path}/wrong.jsonl}}")
    refused(ended, "bench.sources.mine=", "no usable prompt")


def stats_of(*rounds: Round, prefill: float) -> DecodingStats:
    stats = DecodingStats(requests=1, tokens=1)
    for one in rounds:
        stats.add(one)
    stats.seconds["prefill"] = prefill
    return stats


def test_the_model_of_the_speed_up_ends_at_the_measured_one() -> None:
    plain_round = Round(0, 0, 0, 1, None, Seconds(verify=4.0, sampling=0.5, bookkeeping=0.5))
    round_ = Round(3, 2, 3, 3, None, Seconds(0.5, 0.5, 5.0, 1.0, 1.0))
    plain = stats_of(*[plain_round] * 6, prefill=5.0)
    ours = stats_of(*[round_] * 2, prefill=6.0)
    model = speed_model(ours, 24.0, plain, 36.0)
    assert model == {
        "expected_tokens": 3.0,
        "draft_cost": 0.25,
        "verify_cost": 1.25,
        "predicted": 2.0,  # 3 / (0.25 + 1.25)
        "with_overhead": round(3 * 5 / 8, 4),
        "with_prefill": round(35 / 22, 4),
        "measured": 1.5,
    }


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, "1-63"), (63, "1-63"), (64, "64-127"), (128, "128-255")]
)
def test_context_buckets(length: int, bucket: str) -> None:
    assert context_bucket({"prompt": [0] * length}) == bucket
