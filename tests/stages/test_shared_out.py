"""Rollout and capture on several processes, and killed at any moment: always the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from dspark_train.artifacts import Artifact
from dspark_train.disk import LOCK
from dspark_train.stages.rollout import responses
from tests.processes import finish, fork, start
from tests.tiny_pipeline import arguments, write_prompts

SHARDS = (
    "capture.num_taps=3",
    "capture.shard_mb=1",
    "rollout.shard_prompts=40",
    "rollout.max_new_tokens=24",
)
KILLS = 20
# what Python reports of work on files, https://docs.python.org/3/library/audit_events.html
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def command(target: Path, prompts: Path, run: Path, *given: str) -> list[str]:
    return [sys.executable, "-m", "dspark_train", *arguments(target, prompts, run, *SHARDS, *given)]


def contents(run: Path) -> dict[str, bytes]:
    """Bytes of everything that rollout and capture left; of manifests all but the seconds."""
    found = {}
    files = (path for path in run.rglob("*") if path.is_file() and path.name != LOCK)
    for path in sorted(files):
        name = path.relative_to(run).as_posix()
        found[name] = path.read_bytes()
        if path.name == "manifest.json":
            manifest = json.loads(found[name])
            del manifest["seconds"], manifest["manifest_sha256"]
            found[name] = json.dumps(manifest).encode()
    return found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough of them for several shards of a megabyte."""
    return write_prompts(tmp_path_factory.mktemp("many") / "prompts.jsonl", 400)


@pytest.fixture(scope="module")
def whole(
    tiny_target_folder: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run by one process that nobody interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    given = command(tiny_target_folder, prompts, run, "stages=[rollout,capture]")
    subprocess.run(given, check=True, capture_output=True)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_processes_leaves_the_same_bytes(
    tiny_target_folder: Path, prompts: Path, tmp_path: Path, whole: Path, count: int
) -> None:
    """Disjoint, complete, and the same whatever the number of processes."""
    run = tmp_path / "run"
    given = command(tiny_target_folder, prompts, run, "stages=[rollout,capture]")
    ended = finish(start(given, count))
    assert [process.returncode for process in ended] == [0] * count, ended
    assert contents(run) == contents(whole)
    rollout = Artifact.open(run / "rollout")
    rows = [(r["id"], r["sample"]) for r in responses(run / "rollout", rollout.facts["shards"])]
    assert len(rows) == len(set(rows)) == rollout.counts["splits"]["train"]
    assert Artifact.open(run / "capture").counts["shards"] >= 3


@pytest.mark.slow
def test_a_process_that_dies_fails_the_stage_which_then_resumes(
    tiny_target_folder: Path, prompts: Path, tmp_path: Path, whole: Path
) -> None:
    """Rank 1 is killed; rank 0 does not finish without it. Another number of processes goes on."""
    run = tmp_path / "run"
    given = command(tiny_target_folder, prompts, run, "stages=[rollout,capture]")
    processes = start(given, 2)
    while not list(run.glob("rollout/rollouts-*.jsonl")):
        assert processes[0].poll() is None
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGKILL)
    first, _ = finish(processes)
    assert first.returncode != 0, first
    assert "one of them has ended" in first.stderr
    assert not (run / "rollout" / "manifest.json").exists()
    ended = finish(start(given, 3))
    assert [process.returncode for process in ended] == [0, 0, 0], ended
    assert contents(run) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rollout", "capture"])
def test_kill_9_at_twenty_moments(
    tiny_target_folder: Path, prompts: Path, tmp_path: Path, whole: Path, stage: str
) -> None:
    """Killed at random moments of its work, again and again, it ends with the bytes of a whole run.

    Between being killed and going on, nothing is cleaned up. A moment is a little after something
    happens to a file of the stage, so that slow machines do not move it. A fork that has loaded
    everything stands for the new process.
    """
    run, log = tmp_path / "run", tmp_path / "out.log"
    if stage == "capture":
        shutil.copytree(whole / "rollout", run / "rollout")
    given = command(tiny_target_folder, prompts, run, f"stages=[{stage}]")
    dice, killed, events = random.Random(stage), 0, 0
    while killed < KILLS:
        moment = dice.randint(1, events) if events else 0
        child = fork_main(given[3:], log, run / stage, moment, dice.uniform(1e-6, 0.01))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGALRM, log.read_text()
            killed += 1
        else:  # less was left to do: the same bytes, and another run from the beginning
            assert os.WEXITSTATUS(status) == 0, log.read_text()
            assert contents_of(run, stage) == contents_of(whole, stage)
            shutil.rmtree(run / stage)
            events = events or int(log.read_text().split()[-1])
    subprocess.run(given, check=True, capture_output=True)
    assert contents_of(run, stage) == contents_of(whole, stage)


def contents_of(run: Path, stage: str) -> dict[str, bytes]:
    return {n: c for n, c in contents(run).items() if n.startswith(f"{stage}/")}


def fork_main(given: list[str], log: Path, folder: Path, moment: int, delay: float) -> int:
    """Run the command line in a fork of this process; its number.

    `delay` seconds after the `moment`-th event in `folder`, the kernel ends it; the log ends with
    the number of events where that does not happen.
    """
    from dspark_train.__main__ import main

    child = fork()
    if child:
        return child
    seen, status = 0, 1

    def count(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event in FILE_EVENTS and str(arguments[0]).startswith(f"{folder}/"):
            seen += 1
            if seen == moment:
                signal.setitimer(signal.ITIMER_REAL, delay)

    try:
        with log.open("w") as file:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a process as kill -9 does
            sys.addaudithook(count)
            sys.argv = ["dspark_train", *given]
            sys.stdout = sys.stderr = file
            try:
                main()
                print(seen)
                status = 0
            except BaseException:  # a refusal is a SystemExit
                traceback.print_exc()
    finally:
        os._exit(status)
