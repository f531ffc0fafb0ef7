"""Traces are kept whole, and halved by conversation."""

import pytest
import torch

from dspark_train.calibration.traces import TracedRound, Traces
from tests.calibration.planted import planted_traces


def rounds() -> list[TracedRound]:
    return [
        TracedRound([0.5, -1.0], [0.9, 0.25], 1, 2, 17, 3, "math", 0.7),
        TracedRound([2.0], [1.0], 1, 1, 20, 3, "math", 0.7),
        TracedRound([1.0, 1.5, 2.5], [0.5, 0.5, 0.5], 0, 3, 5, 8, "chat", 0.0),
    ]


def test_columns_and_file(tmp_path) -> None:
    traces = Traces.collect(rounds(), 3)
    traces.save(tmp_path / "traces.safetensors")
    read = Traces.load(tmp_path / "traces.safetensors")
    assert read.domains == ("chat", "math")
    assert read.domain.tolist() == [1, 1, 0]
    assert read.proposed.tolist() == [2, 1, 3]
    assert read.accepted.tolist() == [1, 1, 0]
    assert read.known.tolist() == [2, 1, 3]
    assert read.context.tolist() == [17, 20, 5]
    assert read.temperature.tolist() == pytest.approx([0.7, 0.7, 0.0])
    assert torch.equal(read.logits, torch.tensor([[0.5, -1, 0], [2, 0, 0], [1, 1.5, 2.5]]))
    assert read.overlap[0, :2].tolist() == pytest.approx([0.9, 0.25])
    assert read.overlap.isnan().tolist() == [
        [False, False, True],
        [False, True, True],
        [False, False, False],
    ]


def test_halves_keep_conversations_together() -> None:
    traces = planted_traces([1.0, 1.0], 500, conversations=7)
    first, second = traces.halves()
    assert len(first) + len(second) == 500
    assert not set(first.conversation.tolist()) & set(second.conversation.tolist())
    assert {*first.conversation.tolist(), *second.conversation.tolist()} == set(range(7))


def test_one_conversation_cannot_be_halved() -> None:
    with pytest.raises(ValueError, match="1 conversations cannot be halved"):
        planted_traces([1.0], 5, conversations=1).halves()


def test_another_file_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "traces.safetensors"
    with pytest.raises(ValueError, match=r"traces\.safetensors holds no traces"):
        Traces.load(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"traces\.safetensors holds no traces"):
        Traces.load(path)
