"""Requests that come at any time give what they give alone, and none harms another."""

import threading
from unittest import mock

import pytest

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.scheduler import Fixed
from dspark_train.serving.batching import Batcher
from dspark_train.serving.tickets import QueueFullError, StoppedError
from tests.random_drafter import make_drafter

PROMPTS = [[1, 4, 2, 0, 3], [2], [3, 3, 1, 0, 1, 2, 4, 4, 0], [0, 1], [4, 2, 4, 2, 4], [1] * 14]
SAMPLERS = [
    SamplingSettings(),
    SamplingSettings(1.0, seed=11),
    SamplingSettings(0.7, top_k=3, seed=12),
    SamplingSettings(1.2, top_p=0.9, seed=13),
    SamplingSettings(1.0, min_p=0.1, seed=14),
    SamplingSettings(1.0, seed=15, presence_penalty=0.5),
]


class Listener:
    """Keeps what it is told of one request."""

    def __init__(self) -> None:
        self.progress, self.ended = [], threading.Event()

    def __call__(self, progress) -> None:
        self.progress.append(progress)
        if progress.end is not None:
            self.ended.set()

    @property
    def end(self):
        assert self.ended.wait(60)
        return self.progress[-1].end


@pytest.fixture
def engine(random_target):
    def make(rows: int = 2) -> Engine:
        target = random_target(vocab_size=5, num_layers=2, seed=5)
        proposer = BlockProposer(make_drafter(target, 4), target.head)
        return Engine(target, proposer, rows=rows, reads_ahead=True)

    return make


@pytest.fixture
def batcher(engine):
    made = []

    def make(rows: int = 2, **settings) -> Batcher:
        made.append(Batcher(engine(rows), **settings))
        return made[-1]

    yield make
    for one in made:
        if one.alive:
            one.close(finish=False)


def requests() -> list[Request]:
    pairs = zip(PROMPTS, SAMPLERS, strict=True)
    return [Request(prompt, settings, 12 + len(prompt)) for prompt, settings in pairs]


def alone(engine) -> list[list[int]]:
    outputs = []
    for request in requests():
        one = engine(1)
        one.add([request])
        while request.finish_reason is None:
            one.step()
        outputs.append(request.new_tokens)
    return outputs


@pytest.mark.parametrize("max_positions", [1000, 30])
@pytest.mark.parametrize("chunk", [2, 100])
def test_requests_give_what_they_give_alone(engine, batcher, max_positions, chunk) -> None:
    """In pieces, in any company, and preempted again and again."""
    one = batcher(3, max_positions=max_positions, chunk=chunk)
    one.start()
    batch, listeners = requests(), [Listener() for _ in PROMPTS]
    for request, listener in zip(batch, listeners, strict=True):
        one.submit(request, listener)
    assert [listener.end for listener in listeners] == ["length"] * len(batch)
    assert [request.new_tokens for request in batch] == alone(engine)
    preempted = one.metrics.preempted._value.get()
    assert (preempted > 0) == (max_positions == 30)
    for request, listener in zip(batch, listeners, strict=True):
        places = [place for p in listener.progress for place in range(p.start, p.stop)]
        assert places == list(range(len(request.new_tokens)))


def test_text_comes_in_pieces_that_make_the_whole(batcher, random_target) -> None:
    from dspark_train.decoding.admission import admit

    one = batcher(2)
    target = one.engine.target
    request = admit(target, 5, [1, 2], 20, SamplingSettings(1.0, seed=3))
    listener = Listener()
    one.start()
    one.submit(request, listener)
    assert listener.end == "length"
    assert "".join(p.text for p in listener.progress) == request.text.text
    assert len([p for p in listener.progress if p.text]) > 2


def test_requests_begin_in_the_order_they_came(batcher) -> None:
    one = batcher(1)
    order, batch = [], requests()
    for number, request in enumerate(batch):
        one.submit(request, lambda p, n=number: order.append(n) if p.end else None)
    one.start()
    one.close()
    assert order == list(range(len(batch)))


def test_the_oldest_gets_on_whatever_room_there_is(batcher) -> None:
    """One request alone may hold more than the limit: it is never preempted."""
    one = batcher(3, max_positions=1)
    listeners = [Listener() for _ in PROMPTS]
    one.start()
    for request, listener in zip(requests(), listeners, strict=True):
        one.submit(request, listener)
    assert {listener.end for listener in listeners} == {"length"}


def test_cancelled_requests_free_their_rows(batcher) -> None:
    one = batcher(2, chunk=1)
    listeners = [Listener() for _ in range(4)]
    long = [Request([1, 2, 3, 4], SamplingSettings(), 50) for _ in listeners]
    tickets = [one.submit(r, listener) for r, listener in zip(long, listeners, strict=True)]
    for _ in range(6):
        one.turn()
    assert len(one.live) == 1
    assert one.reading is tickets[1]
    for ticket in tickets[:3]:  # one that runs, one that is being read, one that waits
        one.cancel(ticket)
    one.turn()
    assert [listener.progress[-1].end for listener in listeners[:3]] == ["cancelled"] * 3
    assert one.engine.free == 2
    one.start()
    assert listeners[3].end == "length"
    assert len(long[3].new_tokens) == 50


def test_a_full_queue_refuses(batcher) -> None:
    one = batcher(1, max_waiting=2)
    for request in requests()[:2]:
        one.submit(request, Listener())
    with pytest.raises(QueueFullError):
        one.submit(requests()[2], Listener())
    assert one.metrics.refused._value.get() == 1


def test_closing_finishes_what_is_there(batcher) -> None:
    one = batcher(2)
    listeners = [Listener() for _ in PROMPTS]
    one.start()
    for request, listener in zip(requests(), listeners, strict=True):
        one.submit(request, listener)
    one.close()
    assert [listener.progress[-1].end for listener in listeners] == ["length"] * len(PROMPTS)
    with pytest.raises(StoppedError):
        one.submit(requests()[0], Listener())


def test_closing_at_once_fails_what_is_there(batcher) -> None:
    one = batcher(1)
    listeners = [Listener() for _ in PROMPTS]
    for request, listener in zip(requests(), listeners, strict=True):
        one.submit(Request(request.tokens, request.settings, 10**4), listener)
    one.start()
    one.close(finish=False)
    assert {listener.progress[-1].end for listener in listeners} == {"failed"}
    assert "shutting down" in listeners[0].progress[-1].error


class Poison:
    """A logits processor that fails after a few tokens."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 5:
            raise ValueError("poison")
        return scores


def test_a_failing_processor_takes_nobody_down(engine, batcher) -> None:
    one = batcher(3)
    batch, listeners = requests(), [Listener() for _ in PROMPTS]
    bad = Request([1, 2, 3], SamplingSettings(1.0, seed=1, processors=[Poison()]), 20)
    spoilt = Listener()
    one.start()
    one.submit(bad, spoilt)
    for request, listener in zip(batch, listeners, strict=True):
        one.submit(request, listener)
    assert spoilt.end == "failed"
    assert "poison" in spoilt.progress[-1].error
    assert [listener.end for listener in listeners] == ["length"] * len(batch)
    assert [request.new_tokens for request in batch] == alone(engine)


@pytest.mark.parametrize("where", ["step", "read"])
def test_an_unexpected_error_takes_nobody_else_down(engine, batcher, where) -> None:
    """Whoever makes the engine fail is found by letting everybody go on alone."""
    one = batcher(3)
    batch, listeners = requests(), [Listener() for _ in PROMPTS]
    real = getattr(one.engine, where)

    def failing(*given):
        present = [*one.engine.requests, one.engine.reading]
        if batch[2] in present and (where == "step" or one.engine.reading is batch[2]):
            raise RuntimeError("out of memory")
        return real(*given)

    with mock.patch.object(one.engine, where, failing):
        one.start()
        for request, listener in zip(batch, listeners, strict=True):
            one.submit(request, listener)
        ends = [listener.end for listener in listeners]
    assert ends == ["length", "length", "failed", "length", "length", "length"]
    expected = alone(engine)
    for i in (0, 1, 3, 4, 5):
        assert batch[i].new_tokens == expected[i]


def test_the_metrics_add_up(batcher) -> None:
    one = batcher(2)
    one.engine.scheduler = Fixed(2)
    batch, listeners = requests(), [Listener() for _ in PROMPTS]
    one.start()
    for request, listener in zip(batch, listeners, strict=True):
        one.submit(request, listener)
    one.close()
    page = one.metrics.text().decode()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    new = sum(len(request.new_tokens) for request in batch)
    assert float(values["dspark_generated_tokens_total"]) == new
    assert float(values['dspark_requests_total{reason="length"}']) == len(batch)
    assert float(values["dspark_prompt_tokens_total"]) == sum(map(len, PROMPTS))
    assert float(values["dspark_requests_running"]) == 0
    rounds = float(values["dspark_rounds_total"])
    accepted = float(values["dspark_drafts_accepted_sum"])
    assert rounds + accepted == new - len(batch)
    assert float(values["dspark_drafts_verified_total"]) <= 2 * rounds
