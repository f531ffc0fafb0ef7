"""What a policy does while the load changes, step by step, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from dspark_train.calibration.traces import Traces
from dspark_train.decoding.cost_table import CostTable
from dspark_train.decoding.policies import Policy
from dspark_train.serving.simulation import Rounds, play


@dataclass(frozen=True)
class SchedulerTrace:
    """S steps of a policy.

    Attributes:
        requests: `[S]` at a time.
        lengths: of every step the verify lengths of its requests.
        tokens: `[S]` that were committed per second of the step.
    """

    requests: np.ndarray
    lengths: list[np.ndarray]
    tokens: np.ndarray


def scheduler_trace(
    policy: Policy, costs: CostTable, traces: Traces, requests: Sequence[int], seed: int = 0
) -> SchedulerTrace:
    """Run `policy` for one step with each of `requests` numbers of requests.

    Args:
        policy: fresh.
        costs: seconds of a step.
        traces: recorded rounds, as in `simulate`; requests never end here.
        requests: 1 or more each; whoever comes first stays longest.
        seed: of the random numbers.

    Raises:
        ValueError: a step without requests, or traces without a whole round.
    """
    if min(requests, default=0) < 1:
        raise ValueError(f"requests={list(requests)}, expected 1 or more in every step")
    random, rows = np.random.default_rng(seed), Rounds(traces)
    place = rows.start(random, max(requests))
    ids, lengths, tokens = np.arange(max(requests)), [], []
    limits = np.full(max(requests), rows.logits.shape[1])
    for n in requests:
        drafted, verified, accepted = play(policy, rows, place[:n], ids[:n], limits[:n], random)
        size = n + int(verified.sum())
        speed = costs.steps_per_second(size, 0.0, int(np.count_nonzero(drafted)))[size]
        lengths.append(verified)
        tokens.append(float((accepted + 1).sum() * speed))
        place[:n] = rows.next(place[:n])
    return SchedulerTrace(np.array(requests), lengths, np.array(tokens))


def trace_figure(trace: SchedulerTrace, costs: CostTable) -> Figure:
    """Load and verify lengths over time, and the cost curve that is behind them."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    over_time, curve = figure.subplots(1, 2, width_ratios=(2, 1))
    steps = np.arange(len(trace.requests))
    mean = [lengths.mean() for lengths in trace.lengths]
    ends = [(lengths.min(), lengths.max()) for lengths in trace.lengths]
    over_time.fill_between(steps, *np.transpose(ends), step="mid", alpha=0.2, label="all requests")
    over_time.plot(steps, mean, label="mean")
    over_time.set(xlabel="step", ylabel="drafts verified per request")
    over_time.legend(loc="upper left", fontsize="small")
    load = over_time.twinx()
    load.step(steps, trace.requests, where="mid", color="gray", linestyle=":")
    load.set(ylabel="requests (dotted)")
    sizes = np.array(
        [n + lengths.sum() for n, lengths in zip(trace.requests, trace.lengths, strict=True)]
    )
    seconds = costs.verify_seconds(int(sizes.max()))
    curve.plot(np.arange(1, len(seconds)), seconds[1:], label="a target pass")
    curve.plot(sizes, seconds[sizes], ".", alpha=0.4, label="the steps on the left")
    curve.set(xlabel="tokens in the pass", ylabel="seconds", ylim=(0, None))
    curve.legend(fontsize="small")
    return figure
