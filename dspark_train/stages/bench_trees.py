"""What the nodes of trees buy: accepted length against verified nodes, beside the chain."""

from typing import Any

from rich.table import Table

from dspark_train.stages.report import case, table_of

Entry = dict[str, Any]
CHAINS = ("dspark", "dflash")


def tree_gains(rows: list[Entry]) -> list[Entry]:
    """Every row of a tree beside the chain of the same drafter, sampler and batch.

    Nodes are the drafts that entered the target pass of a round, anchors not counted. `per_node` is
    extra accepted length per extra verified node, None where the tree has no more nodes.
    """
    gains = []
    for row in rows:
        if row["name"].partition(":")[0] != "tree":
            continue
        same = [
            other
            for name in CHAINS
            for other in rows
            if other["name"] == name and _setting(other) == _setting(row)
        ]
        if not same:
            continue
        chain = same[0]
        extra, more = row["tau"] - chain["tau"], _nodes(row) - _nodes(chain)
        gains.append(
            {
                "name": row["name"],
                "sampler": row["sampler"],
                "batch": row.get("batch", 1),
                "chain": chain["name"],
                "tau": [chain["tau"], row["tau"]],
                "nodes": [round(_nodes(chain), 2), round(_nodes(row), 2)],
                "extra_accepted": round(extra, 4),
                "extra_nodes": round(more, 2),
                "per_node": round(extra / more, 4) if more > 0.005 else None,
            }
        )
    return gains


def tree_table(gains: list[Entry]) -> Table:
    """The gains on the terminal."""
    table = table_of(
        "trees against the chain of the same drafter, per round",
        ("sampler", "decoder", "chain"),
        ("τ", "verified nodes", "extra accepted length", "per extra verified node"),
    )
    for gain in gains:
        per_node = gain["per_node"]
        table.add_row(
            case(gain),
            gain["name"],
            gain["chain"],
            "{:.2f} → {:.2f}".format(*gain["tau"]),
            "{:.1f} → {:.1f}".format(*gain["nodes"]),
            f"{gain['extra_accepted']:+.2f}",
            "" if per_node is None else f"{per_node:+.3f}",
        )
    return table


def _setting(row: Entry) -> tuple[Any, ...]:
    return row["sampler"], row.get("batch", 1)


def _nodes(row: Entry) -> float:
    """Drafts that entered the target pass of a round."""
    return row["verified_per_committed"] * row["tau"] - 1
