"""Reliability diagrams (DSpark, figure of section 4): predicted survival against observed."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dspark_train.calibration.ece import expected_calibration_error
from dspark_train.calibration.report import reliability
from dspark_train.calibration.scaling import Scaling
from dspark_train.calibration.traces import Traces


def reliability_figure(traces: Traces, scaling: Scaling) -> Figure:
    """One panel a slot: before and after scaling, the diagonal, and how many rounds a bin has."""
    slots = len(scaling.temperatures)
    columns = min(4, slots)
    rows = -(-slots // columns)
    figure = Figure(figsize=(3 * columns, 3.1 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    kinds = (("before", Scaling.none(slots), "tab:red"), ("after", scaling, "tab:blue"))
    for k, panel in enumerate(panels.flat):
        if k >= slots:
            panel.set_axis_off()
            continue
        panel.plot((0, 1), (0, 1), color="grey", linewidth=1)
        seen = traces.known > k
        passed = traces.accepted[seen] > k
        for name, scale, colour in kinds if len(passed) else ():
            product = scale.products(traces.logits[seen])[:, k]
            predicted, observed, counts = zip(*reliability(product, passed), strict=True)
            ece = float(expected_calibration_error(product, passed))
            label = f"{name}, ECE {100 * ece:.1f} %"
            panel.plot(predicted, observed, "o-", color=colour, markersize=3, label=label)
            if name == "after":
                shares = [0.3 * count / max(counts) for count in counts]
                panel.bar(predicted, shares, width=0.04, color=colour, alpha=0.2)
        panel.set(title=f"slot {k}, {len(passed):,} rounds", xlim=(0, 1), ylim=(0, 1))
        if len(passed):
            panel.legend(loc="upper left", fontsize="small")
    figure.supxlabel("predicted survival")
    figure.supylabel("observed")
    return figure
