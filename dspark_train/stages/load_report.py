"""A table and plots of policies under measured load."""

from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dspark_train.stages.report import print_table, table_of


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each policy and load: medians over rounds."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["concurrency"], row["policy"]), []).append(row)
    numbers = [key for key, value in rows[0].items() if isinstance(value, int | float)]
    return [
        {"policy": name, **{key: median(row[key] for row in group) for key in numbers}}
        for (_, name), group in groups.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """A line for each policy and load."""
    columns = ("tokens/s", "per user", "easy / hard", "first p50", "p50 / p95 / p99 ms")
    columns += ("verified", "per token", "τ")
    table = table_of("policies under load", ("requests", "policy"), columns)
    for row in medians(rows):
        waits = " / ".join(f"{1000 * row[f'token_p{p}']:.0f}" for p in (50, 95, 99))
        table.add_row(
            str(round(row["concurrency"])),
            row["policy"],
            f"{row['throughput']:.1f}",
            f"{row['per_user']:.1f}",
            f"{row['easy_per_user']:.1f} / {row['hard_per_user']:.1f}",
            f"{row['first_p50']:.2f} s",
            waits,
            f"{row['verify_length']:.2f}",
            f"{row['verified_per_token']:.2f}",
            f"{row['tau']:.2f}",
        )
    print_table(table)


def policy_style(name: str, marker: str) -> dict[str, str]:
    """How the line of a policy is drawn: fixed lengths dotted."""
    line = ":" if name.startswith("fixed") else "-"
    return {"linestyle": line, "marker": marker, "label": name}


def pareto_figure(rows: list[dict[str, Any]]) -> Figure:
    """What one user gets against what all get, and against the slowest tokens; verify length."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    trade, tail, length = figure.subplots(1, 3)
    found = medians(rows)
    for name in dict.fromkeys(row["policy"] for row in found):
        mine = [row for row in found if row["policy"] == name]
        style = policy_style(name, "o")
        speed = [row["per_user"] for row in mine]
        trade.plot(speed, [row["throughput"] for row in mine], **style)
        tail.plot(speed, [1000 * row["token_p99"] for row in mine], **style)
        loads = [row["concurrency"] for row in mine]
        length.plot(loads, [row["verify_length"] for row in mine], **style)
    trade.set(xlabel="tokens/s of one user", ylabel="tokens/s of all")
    tail.set(xlabel="tokens/s of one user", ylabel="ms between tokens, p99", yscale="log")
    length.set(xlabel="requests at a time", ylabel="drafts verified per round")
    length.set_xscale("log", base=2)
    trade.legend(fontsize="small")
    return figure
