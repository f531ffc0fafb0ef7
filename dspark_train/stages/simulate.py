"""traces of calibrate + a cost curve -> policies side by side under load, without serving."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table
from tqdm import tqdm

from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.calibration.traces import Traces
from dspark_train.config import Config
from dspark_train.decoding.cost_table import CostTable
from dspark_train.disk import sha256_file
from dspark_train.serving.simulation import flat_then_falling, policy_of, simulate
from dspark_train.stages.calibrate import scaling_of
from dspark_train.stages.load_report import policy_style
from dspark_train.stages.report import print_table
from dspark_train.stages.stage import Outcome


def inputs(config: Config) -> tuple[str, ...]:
    return ("calibrate",)


def settings(config: Config) -> dict[str, Any]:
    given = config.simulate.cost_table and Path(config.simulate.cost_table)
    sha = sha256_file(given) if given and given.is_file() else None
    return {"simulate": asdict(config.simulate), "cost_table_sha256": sha}


def run(config: Config, writer: ArtifactWriter, inputs: Mapping[str, Artifact]) -> Outcome:
    """Write report.json, report.png and the cost table that was used; print a table."""
    s, calibrate = config.simulate, inputs["calibrate"]
    scaling = scaling_of(calibrate)
    if scaling is None:
        raise ValueError(f"{calibrate.directory} has no traces: its drafter has no confidence head")
    traces = Traces.load(calibrate.file("traces.safetensors"))
    traces = traces.shifted(scaling.shifts)
    temperatures = scaling.temperatures.numpy()
    if s.cost_table:
        costs = CostTable.load(s.cost_table)
    else:
        costs = flat_then_falling(max(s.concurrency) * (len(temperatures) + 1))
    jobs = [(name, concurrency) for concurrency in s.concurrency for name in s.policies]
    rows = []
    for name, concurrency in tqdm(jobs, desc="simulate", unit="run", mininterval=1):
        result = simulate(
            policy_of(name, costs, temperatures),
            costs,
            traces,
            concurrency=concurrency,
            requests=max(s.requests, 4 * concurrency),
            tokens=s.tokens,
            seed=s.seed,
        )
        numbers = {key: round(value, 4) for key, value in asdict(result).items()}
        rows.append({"policy": name, "concurrency": concurrency, **numbers})
    writer.write("costs.json", costs.save)
    writer.write("report.json", json.dumps({"rows": rows}, indent=1).encode())
    figure = load_figure(rows)
    writer.write("report.png", lambda path: figure.savefig(path, format="png", dpi=120))
    show(rows)
    best = [max(_of(rows, c), key=lambda row: row["throughput"])["policy"] for c in s.concurrency]
    return Outcome(
        counts={"runs": len(rows), "rounds": len(traces)},
        facts={"report": "report.json"},
        line="best at "
        + ", ".join(f"{c}: {name}" for c, name in zip(s.concurrency, best, strict=True)),
    )


def _of(rows: list[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["concurrency"] == concurrency]


def show(rows: list[dict[str, Any]]) -> None:
    """Throughput and verify length, a line a policy, a column a load."""
    loads = list(dict.fromkeys(row["concurrency"] for row in rows))
    table = Table(title="tokens per step time · verify length, by requests at a time")
    table.add_column("policy")
    for load in loads:
        table.add_column(str(load), justify="right")
    for name in dict.fromkeys(row["policy"] for row in rows):
        cells = [row for row in rows if row["policy"] == name]
        texts = [f"{row['throughput']:.1f} · {row['verify_length']:.1f}" for row in cells]
        table.add_row(name, *texts)
    print_table(table)


def load_figure(rows: list[dict[str, Any]]) -> Figure:
    """Throughput against the best fixed length, verify length, and the trade with each user."""
    loads = list(dict.fromkeys(row["concurrency"] for row in rows))
    best = {
        load: max(
            (row["throughput"] for row in _of(rows, load) if row["policy"].startswith("fixed")),
            default=max(row["throughput"] for row in _of(rows, load)),
        )
        for load in loads
    }
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    gain, length, trade = figure.subplots(1, 3)
    for name in dict.fromkeys(row["policy"] for row in rows):
        mine = [row for row in rows if row["policy"] == name]
        style = policy_style(name, ".")
        at = [row["concurrency"] for row in mine]
        gain.plot(at, [row["throughput"] / best[row["concurrency"]] for row in mine], **style)
        length.plot(at, [row["verify_length"] for row in mine], **style)
        trade.plot([row["per_user"] for row in mine], [row["throughput"] for row in mine], **style)
    for panel in (gain, length):
        panel.set_xscale("log", base=2)
        panel.set_xlabel("requests at a time")
    gain.set(ylabel="throughput / best fixed length")
    length.set(ylabel="drafts verified per request and round")
    trade.set(xlabel="tokens/s of one user", ylabel="tokens/s of all")
    gain.legend(fontsize="small")
    return figure
