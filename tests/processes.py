"""Several processes of one run, as a launcher starts them."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


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


def finish(
    processes: list[subprocess.Popen[str]], timeout: float = 300.0
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
