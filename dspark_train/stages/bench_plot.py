"""A bench as pictures: speed-up, acceptance per slot, accepted lengths."""

from pathlib import Path
from typing import Any

from dspark_train.stages.report import case


def write_plot(path: Path, report: dict[str, Any]) -> None:
    """One line of panels for each sampler and batch size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(map(case, report["rows"])))
    figure = Figure(figsize=(14, 3.2 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(cases), 3, squeeze=False)
    for (speed, slots, lengths), title in zip(axes, cases, strict=True):
        rows = [row for row in report["rows"] if case(row) == title]
        bars = speed.barh(
            [row["name"] for row in rows], [row["speedup_over_plain"] for row in rows]
        )
        speed.bar_label(bars, [f"{row['tokens_per_second']:.0f} tok/s" for row in rows], padding=3)
        speed.axvline(1.0, color="grey", linewidth=1)
        speed.margins(x=0.2)
        speed.invert_yaxis()
        speed.set(title=title, xlabel="speed-up over plain decoding")
        drafted = [row for row in rows if row["acceptance_per_slot"]]
        width = 0.8 / max(len(drafted), 1)
        for i, row in enumerate(drafted):
            rates, counts = row["acceptance_per_slot"], row["accepted_histogram"]
            slots.plot(range(len(rates)), rates, "o-", label=f"{row['name']}, τ {row['tau']:.2f}")
            places = [n + (i - (len(drafted) - 1) / 2) * width for n in range(len(counts))]
            shares = [count / sum(counts) for count in counts]
            lengths.bar(places, shares, width, label=row["name"])
        slots.set(
            title=title, xlabel="slot", ylabel="acceptance, given the earlier slots", ylim=(0, 1)
        )
        lengths.set(title=title, xlabel="accepted drafts", ylabel="share of the rounds")
        if drafted:
            slots.legend()
            lengths.legend()
    figure.savefig(path, format="png", dpi=120)
