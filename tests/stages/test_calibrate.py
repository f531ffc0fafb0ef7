"""What calibration leaves behind, and the confidence head on sampled prefixes."""

import json
from pathlib import Path

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.calibration.traces import Traces
from dspark_train.drafter import load_drafter
from dspark_train.stages.calibrate import require_finite
from tests.tiny_pipeline import Run, refused

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "confidence.ipynb"


def test_traces_and_report(finished_run: Path) -> None:
    artifact = Artifact.open(finished_run / "calibrate")
    traces = Traces.load(artifact.file("traces.safetensors"))
    facts = json.loads(artifact.file("temperatures.json").read_text())
    assert len(traces) == artifact.counts["rounds"] == sum(facts["rounds"].values())
    verified = torch.arange(traces.logits.shape[1]) < traces.proposed[:, None]
    assert torch.equal(~traces.overlap.isnan(), verified)
    assert bool(((traces.overlap[verified] >= 0) & (traces.overlap[verified] <= 1 + 1e-6)).all())
    assert bool((traces.accepted <= traces.known).all())
    # a draft that stands was possible, one with no overlap never stands
    standing = torch.arange(traces.logits.shape[1]) < traces.accepted[:, None]
    assert bool((traces.overlap[standing] > 0).all())
    assert artifact.file("reliability.png").read_bytes().startswith(b"\x89PNG")
    first = facts["slots"][0]
    assert first["after"]["rounds"] <= facts["rounds"]["report"]
    assert {"before", "after", "shared", "sts", "isotonic", "platt"} <= set(first)
    assert first["temperature"] == pytest.approx(facts["temperatures"][0], abs=1e-4)


def test_the_shift_is_in_the_exported_head(finished_run: Path) -> None:
    """Decoders that know of no shift have it all the same; no other weight changes."""
    facts = Artifact.open(finished_run / "calibrate").facts
    shift = facts["shift"]
    folders = (finished_run / "train" / "drafter", finished_run / "export" / "checkpoint")
    trained, exported = (load_drafter(folder).state_dict() for folder in folders)
    name = "confidence_head.proj.bias"
    expected = trained.pop(name).float() + shift
    assert shift != 0
    assert torch.allclose(exported.pop(name).float(), expected, rtol=2**-8)
    assert all(torch.equal(exported[key].float(), trained[key].float()) for key in trained)
    config = load_drafter(folders[1]).config
    assert config.confidence_shifts == facts["slot_shifts"]
    assert config.confidence_temperatures == facts["temperatures"]
    assert config.unshifted_temperatures == facts["unshifted_temperatures"]


def test_confidences_that_are_no_numbers_are_refused(finished_run: Path) -> None:
    traces = Traces.load(finished_run / "calibrate" / "traces.safetensors")
    require_finite(traces)
    traces.logits[3, 0] = float("nan")
    traces.logits[4, :2] = float("inf")
    with pytest.raises(ValueError, match=r"3 confidence logits in 2 of .* force="):
        require_finite(traces)


def test_overlap_is_the_rate_of_acceptance(finished_run: Path) -> None:
    """Fault 5: the mean of the exact chances is what is observed at the first slot."""
    traces = Traces.load(finished_run / "calibrate" / "traces.safetensors")
    chance = traces.overlap[:, 0].double()
    seen = traces.known > 0
    error = (chance[seen] * (1 - chance[seen])).sum().sqrt() / seen.sum()
    observed = (traces.accepted[seen] > 0).double().mean()
    assert abs(observed - chance[seen].mean()) < 5 * error + 0.02


def test_one_prompt_is_refused(tiny_run_finished: Run) -> None:
    ended = tiny_run_finished("stages=[calibrate]", "calibrate.prompts=1")
    refused(ended, "1 calibration prompt", "raise calibrate.prompts")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["joint", "staged"])
def test_confidence_on_sampled_prefixes(tiny_run: Run, tmp_path: Path, schedule: str) -> None:
    given = [f"schedule={schedule}", "heads.prefixes=sampled", "heads.prompts=12"]
    given += ["heads.max_new_tokens=16", "rollout.temperature=1.0"]
    ended = tiny_run("stages=[rollout,capture,train,heads,calibrate,export]", *given)
    assert ended.status == 0, ended
    heads = Artifact.open(tmp_path / "run" / "heads")
    numbers = heads.facts["prefixes"]
    assert numbers["bce_sampled"] <= numbers["bce_teacher"]
    assert numbers["drafts"] > 50
    drafters = [load_drafter(tmp_path / "run" / stage / "drafter") for stage in ("train", "heads")]
    before, after = (d.state_dict() for d in drafters)
    if schedule == "joint":
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed <= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    exported = load_drafter(tmp_path / "run" / "export" / "checkpoint").state_dict()
    name = "confidence_head.proj.weight"
    assert torch.equal(exported[name].float(), after[name].float())


@pytest.mark.slow
def test_the_notebook_runs(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("RUN", str(finished_run))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("0 after" in output.get("text", "") for output in outputs)
