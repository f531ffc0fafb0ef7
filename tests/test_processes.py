"""What the tests start of their own."""

import os
import signal

from tqdm import tqdm

from tests.processes import fork


def test_a_fork_killed_inside_a_progress_bar_stops_nobody() -> None:
    """It ends with the lock of its bars in hand; this process and another fork get theirs."""
    shared = tqdm.get_lock().mp_lock
    if not (child := fork()):
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    free = shared.acquire(timeout=5)
    if free:
        shared.release()
    assert free
    if not (child := fork()):
        signal.alarm(20)
        list(tqdm(range(3), disable=False))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
