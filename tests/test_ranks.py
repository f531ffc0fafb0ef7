"""Two processes: who is who, what they share, and what they hear of each other's end."""

import subprocess
import sys

import pytest

from dspark_train import ranks
from tests.processes import finish, start


def test_one_process_waits_for_nobody() -> None:
    assert (ranks.rank(), ranks.world_size(), ranks.first()) == (0, 1, True)
    assert list(ranks.share(range(5))) == [0, 1, 2, 3, 4]
    assert ranks.tell("word") == "word"
    assert ranks.gather(3) == [3]
    ranks.wait()


def test_two_processes_share_and_hear_rank_0() -> None:
    code = (
        "from dspark_train import ranks\n"
        "told = ranks.tell(f'from {ranks.rank()}')\n"
        "everyone = ranks.gather(list(ranks.share(range(5))))\n"
        "ranks.wait()\n"
        "print(ranks.rank(), ranks.world_size(), ranks.first(), told, everyone)"
    )
    said = [ended.stdout.strip() for ended in finish(start([sys.executable, "-c", code], 2))]
    assert said == [
        "0 2 True from 0 [[0, 2, 4], [1, 3]]",
        "1 2 False from 0 [[0, 2, 4], [1, 3]]",
    ]


def test_who_waits_for_an_ended_process_hears_of_it() -> None:
    code = (
        "import os\nfrom dspark_train import ranks\n"
        "ranks.wait()\n"
        "if ranks.first(): os._exit(3)\n"
        "ranks.wait()"
    )
    first, second = finish(start([sys.executable, "-c", code], 2))
    assert first.returncode == 3
    assert second.returncode != 0
    assert "ConnectionError: rank 1 waited for the others" in second.stderr


def test_who_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from dspark_train import ranks; ranks.join()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "rank 1 of 2 cannot meet the others at None" in ended.stderr
