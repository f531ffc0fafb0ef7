"""Several processes of one run, as a launcher starts them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

SECONDS = 300


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def meeting(count: int) -> dict[str, str]:
    """How `count` ranks of a run on this machine find each other."""
    return {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def fork() -> int:
    """As `os.fork`, with a lock of its own for the progress bars of the new process.

    That lock is one semaphore for all forks: whoever is killed while it holds it would stop the
    bars of all others, and of this process, for ever.
    """
    child = os.fork()
    if not child:
        tqdm.set_lock(threading.RLock())
    return child


def forked(work: Callable[[], None], count: int, folder: Path) -> None:
    """Do `work` as each of `count` ranks, in forks of this process, which need no imports.

    Raises:
        AssertionError: one of them failed; the message is what it printed.
    """
    shared, children = meeting(count), {}
    for rank in range(count):
        log = folder / f"rank{rank}.log"
        if child := fork():
            children[child] = log
            continue
        status = 1
        signal.alarm(SECONDS)  # who waits for one that failed ends, too
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ |= {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    ended = {log: os.waitpid(child, 0)[1] for child, log in children.items()}
    assert not any(ended.values()), "\n".join(log.read_text() for log in ended)


def start(command: Sequence[str], count: int) -> list[subprocess.Popen[str]]:
    """Start a command as each of `count` ranks."""
    shared = {
        **os.environ,
        "PYTHONPATH": ":".join(sys.path),
        "OMP_NUM_THREADS": "1",
        **meeting(count),
    }
    return [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def finish(
    processes: list[subprocess.Popen[str]], timeout: float = SECONDS
) -> list[subprocess.CompletedProcess[str]]:
    """How each ended, in order of rank."""
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(processes, said, strict=True)
    ]
