"""A bench on the terminal: speeds, the model of the speed-up, and acceptance by kind of prompt."""

from typing import Any

from rich.table import Table

from dspark_train.decoding.stats import Seconds
from dspark_train.stages.bench_trees import tree_table
from dspark_train.stages.report import case, print_table, table_of

Entry = dict[str, Any]


def show(report: dict[str, Any]) -> None:
    """Print all tables of a report; those of one domain and one length say nothing new."""
    first, env, rows = report["rows"][0], report["environment"], report["rows"]
    print_table(
        speeds(
            rows,
            f"{first['prompts']} held-out prompts · {env['target']['name']} · {env['dtype']} · "
            f"{env['machine']} · {env['threads']} threads",
        )
    )
    if any(row["speed_model"] for row in rows):
        print_table(models(rows))
    if "trees" in report:
        print_table(tree_table(report["trees"]))
    for kind in first["by"]:
        if len(first["by"][kind]) > 1:
            print_table(groups(rows, kind))


def per_slot(row: Entry) -> str:
    return " ".join(f"{rate:.2f}" for rate in row["acceptance_per_slot"])


def speeds(rows: list[Entry], title: str) -> Table:
    """Speed of every row, and where the time of its rounds went."""
    parts = Seconds._fields
    table = table_of(
        title,
        ["sampler", "decoder"],
        ["τ", "tokens/s", "x plain", "median", "verified / token", " / ".join(parts)],
        ["accepted per slot", "greedy output"],
    )
    for row in rows:
        seconds = [row["seconds"][part] for part in parts]
        shares = " / ".join(f"{100 * part / (sum(seconds) or 1):.0f}" for part in seconds)
        same = "" if row["greedy_identical"] is None else "identical"
        if row["greedy_identical"] is False:
            ties = row["near_ties"]
            same = f"{ties} near tie{'s' if ties > 1 else ''}"
        verified = row["verified_per_committed"]
        table.add_row(
            case(row),
            row["name"],
            f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup_over_plain']:.2f}",
            f"{row['median_speedup']:.2f}",
            "" if verified is None else f"{verified:.2f}",
            f"{shares} %" if any(seconds) else "",
            per_slot(row),
            same,
        )
    return table


def models(rows: list[Entry]) -> Table:
    """The simple model of the speed-up, corrected step by step until it is the measured one."""
    table = table_of(
        "speed-up = τ / (draft + verify), costs in plain passes; then what the model leaves out",
        ["sampler", "decoder"],
        ["τ", "draft", "verify", "model", "+ overhead", "+ prefill", "measured", "outside models"],
        [],
    )
    keys = ["expected_tokens", "draft_cost", "verify_cost"]
    keys += ["predicted", "with_overhead", "with_prefill", "measured"]
    for row in rows:
        if row["speed_model"] and row["name"] != "plain":
            values = [f"{row['speed_model'][key]:.2f}" for key in keys]
            table.add_row(case(row), row["name"], *values, f"{100 * row['outside_models']:.1f} %")
    return table


def groups(rows: list[Entry], kind: str) -> Table:
    """Acceptance by domain or by length of the prompt."""
    table = table_of(
        f"by {kind}",
        ["sampler", "decoder", kind],
        ["prompts", "τ", "x plain"],
        ["accepted per slot"],
    )
    for row in rows:
        for name, group in row["by"][kind].items():
            speed = group.get("speedup_over_plain")
            table.add_row(
                case(row),
                row["name"],
                name,
                str(group["prompts"]),
                f"{group['tau']:.2f}",
                "" if speed is None else f"{speed:.2f}",
                per_slot(group),
            )
    return table
