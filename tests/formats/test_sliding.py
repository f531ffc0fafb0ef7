"""Sliding layers travel only where a window counts from each slot and the block is not causal."""

from pathlib import Path

import pytest
import torch

from dspark_train.drafter import Drafter
from dspark_train.formats import load_drafter, refuse_uncarried
from dspark_train.formats.table import DESTINATIONS, carriers
from tests.formats.test_writing import read, written

CARRY = ("vllm", "sglang", "dflash")


@pytest.fixture
def sliding() -> Drafter:
    """DFlash2 with one sliding layer, as published ones have."""
    drafter, _ = read("zlab-dflash2")
    drafter.config.layer_types = ["full_attention", "sliding_attention"]
    drafter.config.sliding_window = 8
    return drafter


@pytest.mark.parametrize("name", CARRY)
def test_they_arrive(tmp_path: Path, sliding: Drafter, name: str) -> None:
    fields, _ = written(tmp_path / name, name, sliding)
    assert fields["layer_types"] == ["full_attention", "sliding_attention"]
    assert fields["sliding_window"] == 8
    assert fields["use_sliding_window"] is True
    assert fields["is_causal"] is False
    reloaded = load_drafter(tmp_path / name)
    assert reloaded.config.windows == [None, 8]
    for key, tensor in sliding.state_dict().items():
        assert torch.equal(reloaded.state_dict()[key], tensor)


@pytest.mark.parametrize("name", sorted(set(DESTINATIONS) - set(CARRY)))
def test_elsewhere_they_are_refused(sliding: Drafter, name: str) -> None:
    assert carriers(sliding.config) == ["native", *CARRY]
    with pytest.raises(ValueError, match=r"cannot carry .*\[native, vllm, sglang, dflash\] can"):
        refuse_uncarried(name, sliding.config)
