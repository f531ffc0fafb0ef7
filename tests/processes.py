"""Several processes of one run, as a launcher starts them."""

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.two_processes import free_port


def start(command: Sequence[str], count: int) -> list[subprocess.Popen[str]]:
    """Start a command as each of `count` ranks."""
    shared = {
        **os.environ,
        "PYTHONPATH": ":".join(sys.path),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
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


def finish(processes: list[subprocess.Popen[str]], timeout: float = 300.0) -> list[tuple[int, str]]:
    """Status and messages of each, in order of rank."""
    try:
        said = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]
