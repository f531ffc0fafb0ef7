"""One round on a line of time: which part of which model ran when."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from dspark_train.decoding import SpeculativeDecoder

# part of a round, and when it began and ended
Span = tuple[str, float, float]
LANES = {
    "drafter": "C0",
    "drafter's LM head": "C9",
    "head walk": "C1",
    "target": "C2",
    "target's LM head": "C8",
    "sampling": "C3",
}


@contextmanager
def timed(owner: Any, name: str, lane: str, spans: list[Span]) -> Iterator[None]:
    """While it is open, every call of `owner.name` leaves a span."""
    inside: Callable[..., Any] = getattr(owner, name)
    own = name in vars(owner)

    def call(*args: Any, **more: Any) -> Any:
        begin = perf_counter()
        try:
            return inside(*args, **more)
        finally:
            spans.append((lane, begin, perf_counter()))

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, inside)
        else:
            delattr(owner, name)


def record_round(decoder: SpeculativeDecoder, prompt: list[int], max_new_tokens: int) -> list[Span]:
    """The spans of the round of middle length among those that draft a whole proposal.

    Seconds from its beginning; the last span, "round", is the whole. On a CPU, where a call ends
    when its work is done.
    """
    engine, proposer = decoder.engine, decoder.proposer
    spans: list[Span] = []
    if engine.fixed is None:
        watched = [(layer, "forward", "target") for layer in decoder.target.layers]
        watched += [(layer, "forward", "drafter") for layer in proposer.drafter.layers]
    else:  # recorded passes are wholes, the target's with its LM head
        watched = [(engine.fixed, "read", "target"), (proposer, "_recorded", "drafter")]
    watched += [(proposer.drafter, "context_kv", "drafter")]
    watched += [(proposer, "_unary", "drafter's LM head"), (engine, "_logits", "target's LM head")]
    watched += [(engine, "step", "round"), (engine, "decide", "sampling")]
    if proposer.markov is not None:
        watched.append((proposer.markov, "step", "head walk"))
    with ExitStack() as stack:
        for owner, name, lane in watched:
            stack.enter_context(timed(owner, name, lane, spans))
        decoder.generate(prompt, max_new_tokens, eos_ids=())
    rounds: list[list[Span]] = []
    for _, begin, end in [span for span in spans if span[0] == "round"]:
        inside = [span for span in spans if begin <= span[1] and span[2] <= end]
        rounds.append([(lane, b - begin, e - begin) for lane, b, e in inside])
    # the last ones may draft less
    whole = [one for one in rounds if len(one) == max(map(len, rounds))]
    return sorted(whole, key=lambda one: one[-1][2])[len(whole) // 2]


def draw_round(path: Path, spans: list[Span]) -> None:
    """Write a picture of recorded spans as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = spans[-1][2]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, (lane, colour) in enumerate(LANES.items()):
        bars = [(1e3 * b, 1e3 * (e - b)) for name, b, e in spans if name == lane]
        share = sum(length for _, length in bars) / (1e3 * whole)
        axes.broken_barh(bars, (place - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
        axes.text(
            1.01, place, f"{100 * share:.1f} %", transform=axes.get_yaxis_transform(), va="center"
        )
    axes.set(
        xlim=(0, 1e3 * whole), xlabel="milliseconds of one round", ylim=(len(LANES) - 0.4, -0.6)
    )
    axes.set_yticks(range(len(LANES)), list(LANES))
    figure.savefig(path, format="png", dpi=100)
