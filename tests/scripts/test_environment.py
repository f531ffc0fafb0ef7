"""The set-up of scripts: once, whoever asks for it at the same time."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# stands for Python: makes an environment whose pip notes that it installs, and takes its time
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -m ] && [ "$2" = venv ]; then
  mkdir -p .venv/bin && cp "$0" .venv/bin/python
elif [ "$1" = -m ]; then
  echo install >>installed
  sleep ${TAKES:-0.3}
fi
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "environment", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def start(clone: Path, **more: str) -> subprocess.Popen[str]:
    path = f"{clone / 'bin'}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", "source scripts/environment; exec echo ready"],
        cwd=clone,
        env={**os.environ, "PATH": path, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_two_at_the_same_time_install_once(clone: Path) -> None:
    said = [process.communicate(timeout=60)[0] for process in (start(clone), start(clone))]
    assert all(text.endswith("ready\n") for text in said), said
    assert "".join(said).count("setting up") == 1
    assert (clone / "installed").read_text().splitlines() == ["install"] * 2
    assert not (clone / ".venv" / "lock").is_symlink()


def test_a_set_up_that_was_killed_is_told(clone: Path) -> None:
    first = start(clone, TAKES="60")
    while not (clone / "installed").exists():
        assert first.poll() is None
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    said, _ = start(clone).communicate(timeout=60)
    assert "a set-up was killed" in said
    assert "ready" not in said
    (clone / ".venv" / "lock").unlink()
    assert start(clone).communicate(timeout=60)[0].endswith("ready\n")


def test_a_set_up_that_fails_lets_the_next_one_try(clone: Path) -> None:
    said, _ = start(clone, TAKES="nonsense").communicate(timeout=60)
    assert "ready" not in said
    assert start(clone).communicate(timeout=60)[0].endswith("ready\n")
