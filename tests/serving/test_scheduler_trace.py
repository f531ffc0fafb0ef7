"""A policy while the load changes, and the notebook that draws it."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_train.serving.scheduler_trace import scheduler_trace, trace_figure
from dspark_train.serving.simulation import flat_then_falling, policy_of
from tests.serving.simulated_traces import P, mixed_traces

COSTS = flat_then_falling(2048)
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "scheduler.ipynb"


def test_lengths_follow_the_load_down_and_up_again() -> None:
    load = [2] * 30 + [150] * 30 + [2] * 30
    policy = policy_of("auto", COSTS, np.ones(P))
    trace = scheduler_trace(policy, COSTS, mixed_traces(), load)
    assert [len(lengths) for lengths in trace.lengths] == load
    light, heavy, again = (
        np.mean([lengths.mean() for lengths in trace.lengths[i : i + 20]]) for i in (10, 40, 70)
    )
    assert heavy < 0.6 * light
    assert again > 0.9 * light
    assert trace.tokens[40:60].mean() > 10 * trace.tokens[10:30].mean()
    figure = trace_figure(trace, COSTS)
    assert len(figure.axes) == 3


def test_without_drafts_the_clock_is_the_curve() -> None:
    trace = scheduler_trace(policy_of("fixed:0", COSTS, np.ones(P)), COSTS, mixed_traces(), [3, 5])
    assert trace.tokens == pytest.approx([3.0, 5.0])
    with pytest.raises(ValueError, match="expected 1 or more in every step"):
        scheduler_trace(policy_of("fixed", COSTS, np.ones(P)), COSTS, mixed_traces(), [2, 0])


def test_the_notebook_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    (tmp_path / "calibrate").mkdir()
    mixed_traces().save(tmp_path / "calibrate" / "traces.safetensors")
    facts = {"shift": -0.2, "temperatures": [1.0] * P}
    (tmp_path / "calibrate" / "temperatures.json").write_text(json.dumps(facts))
    monkeypatch.setenv("RUN", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any("auto" in output.get("text", "") for output in outputs)
