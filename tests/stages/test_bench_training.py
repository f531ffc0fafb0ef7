"""The bench of training steps: its cases, what they report, and what a lack of memory becomes."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_train.stages import bench_training
from dspark_train.training.step_cost import SHAPES, main
from dspark_train.validation import STEP_SHAPES
from tests.tiny_pipeline import refused, run_main

TINY = {"anchors": 8, "context": 40, "hidden_size": 32, "vocab_size": 4000, "markov_rank": 8}
TINY |= {"intermediate_size": 48, "heads": 2, "kv_heads": 1, "head_dim": 16}
CASE = {"shape": "smollm2_135m", "sizes": TINY, "device": "cpu", "threads": None}


def loss_case(loss: str, **changed: Any) -> dict[str, Any]:
    case = {"case": "loss", "loss": loss, "steps": 2, "memory_mb": 0.3, "dtype": "float32"}
    return main({**case, **CASE, **changed})


def stage_of(folder: Path) -> list[str]:
    return [f"run_dir={folder}", "stages=[bench_training]", "target.device=cpu"]


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for the process of a case, which here is the tests' own."""
    monkeypatch.setattr("dspark_train.training.step_cost.keep_to_free_memory", lambda: None)


def test_known_shapes() -> None:
    assert set(STEP_SHAPES) == set(SHAPES)


def test_losses_agree() -> None:
    reference, lean = (loss_case(loss) for loss in ("reference", "lean"))
    assert len(lean["seconds"]) == 2
    assert lean["loss"] == pytest.approx(reference["loss"], rel=1e-4)
    assert lean["gradient"] == pytest.approx(reference["gradient"], rel=1e-4)


def test_time_against_anchors_has_every_number() -> None:
    found = main(
        {"case": "anchors", "anchors": [2, 4], "rounds": 1, "attention": "two_part", **CASE}
    )
    assert set(found["seconds"]) == {2, 4}
    assert all(second > 0 for second in found["seconds"].values())


def test_a_lack_of_memory_is_a_result_and_another_failure_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(message: str) -> Any:
        def reference_loss(*_: Any) -> None:
            raise RuntimeError(message)

        monkeypatch.setattr("dspark_train.training.step_cost.reference_loss", reference_loss)
        return loss_case("reference")

    assert "memory" in fail("DefaultCPUAllocator: can't allocate memory\nmore")["out_of_memory"]
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        fail("shapes do not fit")


def test_a_loss_that_disagrees_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def measured(case: dict[str, Any]) -> dict[str, Any]:
        loss = 1.0 if case["loss"] == "lean" else 1.1
        return {"seconds": [1.0], "peak_mb": 1.0, "loss": loss, "gradient": 1.0}

    monkeypatch.setattr(bench_training, "measured", measured)
    given = [*stage_of(tmp_path), "bench_training.anchors=[]"]
    refused(run_main(monkeypatch, capfd, given), "smollm2_135m", "the loss of the lean loss is 1.0")


def test_the_report_says_what_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def measured(case: dict[str, Any]) -> dict[str, Any]:
        if case["case"] == "anchors":
            return {"seconds": {"32": 1.0, "64": 2.0}}
        if case["loss"] == "reference" and case["shape"] == "qwen3_4b":
            return {"out_of_memory": "killed by the system"}
        cost = {"reference": 4.0, "lean": 1.0}[case["loss"]]
        return {"seconds": [cost], "peak_mb": 10 * cost, "loss": 1.0, "gradient": 1.0}

    monkeypatch.setattr(bench_training, "measured", measured)
    ended = run_main(monkeypatch, capfd, [*stage_of(tmp_path), "bench_training.rounds=2"])
    assert ended.status == 0, ended
    report = json.loads((tmp_path / "bench_training" / "report.json").read_text())
    small, large = (report["losses"][name] for name in ("smollm2_135m", "qwen3_4b"))
    assert small["lean_of_reference"] == {"seconds": 0.25, "peak_mb": 0.25}
    assert small["lean"]["seconds"] == [1.0, 1.0]
    assert large["reference"]["out_of_memory"] == "killed by the system"
    assert large["lean_of_reference"] == {"seconds": None, "peak_mb": None}
    assert "out of memory" in ended.out


@pytest.mark.slow
def test_in_a_process_of_its_own_the_lean_loss_needs_less_memory() -> None:
    case = {"case": "loss", "steps": 1, "memory_mb": 8.0, "dtype": "float32", **CASE}
    case["sizes"] = {**TINY, "vocab_size": 200_000}

    def peak_mb(loss: str) -> float:
        # what malloc keeps of freed memory comes on top: 33 to 82 MB of one step were seen
        case["loss"] = loss
        return min(bench_training.measured(case)["peak_mb"] for _ in range(3))

    reference, logits_mb = peak_mb("reference"), 8 * 7 * 200_000 * 4 / 2**20
    assert reference > 4 * logits_mb
    assert peak_mb("lean") < reference / 4


@pytest.mark.slow
def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        bench_training.measured({"case": "anchors", "nonsense": 1, **CASE})
