"""What a tree's nodes buy, from rows of a report."""

import pytest
from rich.console import Console

from dspark_train.stages.bench_trees import tree_gains, tree_table


def row(name: str, sampler: str, tau: float, nodes: float) -> dict:
    verified = round((nodes + 1) / tau, 4)
    return {"name": name, "sampler": sampler, "tau": tau, "verified_per_committed": verified}


ROWS = [
    row("plain", "greedy", 1.0, 0),
    row("dflash", "greedy", 1.5, 4),
    row("dspark", "greedy", 2.0, 4),
    row("dspark", "temperature 1.0", 1.9, 4),
    row("tree:12", "greedy", 2.4, 12),
    row("tree:4", "temperature 1.0", 2.1, 4),
]


def test_extra_accepted_length_against_extra_nodes():
    wide, narrow = tree_gains(ROWS)
    assert (wide["chain"], wide["extra_accepted"]) == ("dspark", 0.4)
    assert wide["extra_nodes"] == pytest.approx(8, abs=0.01)
    assert wide["per_node"] == pytest.approx(0.05, abs=1e-3)
    assert narrow["extra_accepted"] == pytest.approx(0.2)
    assert narrow["per_node"] is None
    console = Console(width=150, record=True, quiet=True)
    console.print(tree_table([wide, narrow]))


def test_without_heads_the_chain_is_that_of_the_backbone():
    rows = [one for one in ROWS if one["name"] != "dspark"]
    assert [gain["chain"] for gain in tree_gains(rows)] == ["dflash"]
    assert tree_gains(rows[:2]) == []
