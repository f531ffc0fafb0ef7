"""Two processes of one run, as a launcher starts them."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_two(
    command: Sequence[str], timeout: float = 240.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run a command as rank 0 and as rank 1; returns how they ended, in this order."""
    shared = {
        **os.environ,
        "PYTHONPATH": ":".join(sys.path),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(number), "LOCAL_RANK": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(command, process.returncode, out, err)
        for process, (out, err) in zip(processes, said, strict=True)
    ]
