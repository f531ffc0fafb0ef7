"""Sliding layers and causal blocks travel only where they mean the same."""

from pathlib import Path

import pytest

from dspark_train.drafter import Drafter
from dspark_train.formats import refuse_uncarried, write
from dspark_train.formats.check import reload
from dspark_train.formats.destinations import DESTINATIONS, carriers
from tests.formats.test_writing import read, written

MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
# settings, who carries them for DFlash2, and how the file says it
CASES = {
    "windows from each slot": (MIXED, ("vllm", "sglang", "dflash"), {"is_causal": False}),
    "and sliding layers causal": (MIXED | {"causal_blocks": "sliding"}, ("vllm",), {}),
    "and all causal": (MIXED | {"causal_blocks": "all"}, ("vllm",), {"is_causal": True}),
    "all causal": ({"causal_blocks": "all"}, ("vllm",), {"is_causal": True}),
    "windows from the anchor": (
        MIXED | {"window_from": "anchor"},
        ("speculators",),
        {"sliding_window_non_causal": True},
    ),
    "from the anchor, causal": (
        MIXED | {"window_from": "anchor", "causal_blocks": "sliding"},
        ("speculators",),
        {"sliding_window_non_causal": False},
    ),
}


def seeing(case: str) -> Drafter:
    """DFlash2, as published ones are, that sees as a case says."""
    drafter, _ = read("zlab-dflash2")
    for key, value in CASES[case][0].items():
        setattr(drafter.config, key, value)
    return drafter


@pytest.mark.parametrize("case", CASES)
def test_they_arrive(tmp_path: Path, case: str) -> None:
    """Read back they are the same, logits included: the check of every export compares them."""
    drafter, (_, carry, said) = seeing(case), CASES[case]
    assert carriers(drafter.config) == ["native", *carry]
    native = tmp_path / "native"
    write(native, "native", drafter)
    assert reload(native, "native", drafter, None).config.sights == drafter.config.sights
    for name in carry:
        fields, _ = written(tmp_path / name, name, drafter)
        assert said.items() <= fields.items()
        assert "is_causal" in said or name == "speculators" or "is_causal" not in fields
        sizes = fields.get("transformer_layer_config", fields)
        slides = "sliding_window" in CASES[case][0]
        assert (sizes["sliding_window"], sizes["use_sliding_window"]) == (
            (8, True) if slides else (None, False)
        )
        assert reload(tmp_path / name, name, drafter, None).config.sights == drafter.config.sights


@pytest.mark.parametrize("case", CASES)
def test_elsewhere_they_are_refused(case: str) -> None:
    drafter, (_, carry, _) = seeing(case), CASES[case]
    can = ", ".join(("native", *carry))
    for name in sorted(set(DESTINATIONS) - set(carry)):
        with pytest.raises(ValueError, match=rf"cannot carry .*\[{can}\] can"):
            refuse_uncarried(name, drafter.config)
