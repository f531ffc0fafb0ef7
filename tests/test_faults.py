"""The list of fault kinds names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_in_the_list_exists() -> None:
    defined = {
        name
        for path in HERE.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    rows = [line for line in (HERE / "FAULTS.md").read_text().splitlines() if line[2:3].isdigit()]
    assert [int(line.split("|")[1]) for line in rows] == list(range(1, 33))
    named = {name for line in rows for name in re.findall(r"`(test_\w+)`", line)}
    assert named <= defined, named - defined
