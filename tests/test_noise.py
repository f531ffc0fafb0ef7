"""The terminal belongs to our own lines."""

import logging
import re

import pytest

from tests.tiny_pipeline import STAGES, Run

NAMES = (*STAGES, "heads")


@pytest.mark.parametrize("schedule", ["joint", "staged"])
def test_only_our_own_lines_are_printed(tiny_run: Run, schedule: str) -> None:
    """One line a stage on the standard output, its bar on the standard error, no library's."""
    ended = tiny_run(
        "stages=[rollout,capture,train,heads,calibrate,export]", f"schedule={schedule}"
    )
    assert ended.status == 0
    first_words = [line.split()[0] for line in ended.out.splitlines()]
    assert first_words == ["rollout", "capture", "train", "heads", "calibrate", "export"]
    bars = [piece for piece in re.split(r"[\r\n]", ended.err) if piece.strip()]
    assert {bar.split(":")[0] for bar in bars} <= set(NAMES)


def test_our_own_warnings_are_heard_behind_the_command_line(
    tiny_run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """Hydra disables loggers that exist, and hides warnings of those that come later."""
    existing = logging.getLogger("dspark_train.existing")
    tiny_run("stages=[]")
    existing.warning("one")
    logging.getLogger("dspark_train.later").warning("two")
    assert capfd.readouterr().err.splitlines() == ["one", "two"]
