"""Continuous batching: requests join and leave the engine between rounds.

One thread owns the engine. A turn of it is: take what came in, make room, read a piece of a prompt,
one round of everybody, hand on what is new. Requests are begun in the order they came; the one that
came last gives way when memory is short, so the oldest always gets on.
"""

import logging
import threading
from collections import deque
from time import monotonic
from typing import Literal

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.request import Request, RequestError
from dspark_train.serving.metrics import Metrics
from dspark_train.serving.tickets import Progress, QueueFullError, Sink, StoppedError, Ticket

logger = logging.getLogger(__name__)


class Batcher:
    """Runs an engine for requests that come at any time.

    Args:
        engine: made with `reads_ahead`; nobody else may use it.
        max_waiting: requests that may wait for a row.
        max_positions: tokens that all requests of the batch may hold together.
        chunk: tokens of prompts that are read between two rounds.
        metrics: counts everything.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        max_positions: int = 1 << 20,
        chunk: int = 256,
        metrics: Metrics | None = None,
    ) -> None:
        self.engine, self.max_waiting, self.max_positions = engine, max_waiting, max_positions
        self.chunk, self.metrics = chunk, metrics or Metrics()
        self.waiting: deque[Ticket] = deque()
        self.live: dict[int, Ticket] = {}
        self.reading: Ticket | None = None
        self._numbers = 0
        self._changed = threading.Condition()
        self._closing: Literal["no", "finish", "fail"] = "no"
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Queue a request. Called from any thread.

        Raises:
            QueueFullError, StoppedError: it was not taken.
        """
        with self._changed:
            if self._closing != "no":
                raise StoppedError
            if len(self.waiting) >= self.max_waiting:
                self.metrics.refused.inc()
                raise QueueFullError
            self._numbers += 1
            ticket = Ticket(request, sink, self._numbers)
            self.waiting.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Let a request go, wherever it is; its row is free before the next round."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify()

    def close(self, *, finish: bool = True, timeout: float | None = None) -> None:
        """Take nothing more. What is there is finished, or failed at once; then the thread ends."""
        with self._changed:
            self._closing = "finish" if finish else "fail"
            self._changed.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._closing = "fail"
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread serves."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self.waiting or self.live or self.reading or self._closing != "no"):
                    self._changed.wait()
                done = not (self.waiting or self.live or self.reading)
                if self._closing == "fail" or (self._closing == "finish" and done):
                    break
            try:
                self.turn()
            except Exception as error:  # whatever it is, it must not end the service
                logger.exception("a turn of the batcher failed")
                self._isolate(error)
            self._count()
        for ticket in self._everybody():
            self._leave(ticket)
            self._end(ticket, "failed", "the server is shutting down")
        self._count()

    def turn(self) -> None:
        """Everything between two rounds, and a round."""
        self._let_go()
        left = self.chunk
        while left > 0:
            self._admit()
            if self.reading is None or not self.engine.free:
                break
            left -= self._read(left)
        if self.engine.requests:
            self._step()

    def _let_go(self) -> None:
        for ticket in [ticket for ticket in self._everybody() if ticket.cancelled]:
            self._leave(ticket)
            self._end(ticket, "cancelled")

    def _admit(self) -> None:
        while self._held() > self.max_positions and len(self.live) > 1:
            self._preempt(max(self.live.values(), key=lambda ticket: ticket.number))
        with self._changed:
            if self.reading is not None or not self.engine.free or not self.waiting:
                return
            need = len(self.waiting[0].request.tokens)
            if self.live and self._held() + need > self.max_positions:
                return
            self.reading = self.waiting.popleft()
        self.reading.read = 0
        self.engine.begin(self.reading.request)

    def _held(self) -> int:
        """Tokens of the batch, and of what is being read into it."""
        reading = 0 if self.reading is None else len(self.reading.request.tokens)
        return reading + sum(len(ticket.request.tokens) for ticket in self.live.values())

    def _preempt(self, ticket: Ticket) -> None:
        """Back to the head of the queue: its tokens stay, drafts and caches go."""
        self._leave(ticket)
        with self._changed:
            self.waiting.appendleft(ticket)
        self.metrics.preempted.inc()

    def _read(self, count: int) -> int:
        """Read at most `count` more tokens of the prompt; returns how many it took."""
        ticket = self.reading
        count = min(count, max(1, len(ticket.request.tokens) - ticket.read))
        ticket.read += count
        try:
            joined = self.engine.read(count)
        except Exception as error:  # only this request took part
            self._leave(ticket)
            self._end(ticket, "failed", str(error))
            return count
        if joined:
            self.reading = None
            self.live[id(ticket.request)] = ticket
            self._tell(ticket)
            self._take_finished()
        return count

    def _step(self) -> None:
        requests = list(self.engine.requests)
        try:
            rounds = self.engine.step()
        except RequestError as error:
            ticket = self.live[id(error.request)]
            self._leave(ticket)
            self._end(ticket, "failed", str(error))
            return
        for request, one in zip(requests, rounds, strict=True):
            self.metrics.count(one)
            self._tell(self.live[id(request)])
        self._take_finished()

    def _take_finished(self) -> None:
        for request in self.engine.take_finished():
            ticket = self.live.pop(id(request))
            self._end(ticket, request.finish_reason)

    def _tell(self, ticket: Ticket) -> None:
        request, now = ticket.request, monotonic()
        if request.finish_reason is not None:
            return  # the end tells the rest
        text = "" if request.text is None else request.text.take()
        start, ticket.told = ticket.told, len(request.new_tokens)
        self.metrics.told(ticket.told - start, now - (ticket.last or ticket.came), not start)
        ticket.last = now
        if ticket.told > start:
            ticket.sink(Progress(start, ticket.told, text))

    def _end(self, ticket: Ticket, reason: str, error: str | None = None) -> None:
        request, now = ticket.request, monotonic()
        text = "" if request.text is None else request.text.finish()
        start, ticket.told = ticket.told, len(request.new_tokens)
        if ticket.told > start:
            self.metrics.told(ticket.told - start, now - (ticket.last or ticket.came), not start)
        self.metrics.ended(reason, now - ticket.came, request.prompt_length)
        ticket.sink(Progress(start, ticket.told, text, reason, error))

    def _leave(self, ticket: Ticket) -> None:
        """Take a request out of wherever it is."""
        if ticket is self.reading:
            self.reading = self.engine.reading = None
        elif self.live.pop(id(ticket.request), None) is not None:
            self.engine.remove(ticket.request)
        else:
            with self._changed:
                if ticket in self.waiting:
                    self.waiting.remove(ticket)

    def _isolate(self, error: Exception) -> None:
        """A round of everybody failed: each goes on alone for one, and who fails again is out."""
        suspects = list(self.live.values())
        for ticket in suspects:
            self._leave(ticket)
        if not suspects and self.reading is not None:
            suspects = [self.reading]
            self._leave(self.reading)
        if len(suspects) == 1:
            self._end(suspects[0], "failed", str(error))
            return
        for ticket in suspects:
            try:
                if ticket.request.finish_reason is None:
                    self.engine.add([ticket.request])
                    if ticket.request.finish_reason is None:
                        self.engine.step()
            except Exception as own:
                self._clear()
                self._end(ticket, "failed", str(own))
                continue
            self._clear()
            if ticket.request.finish_reason is not None:
                self._end(ticket, ticket.request.finish_reason)
                continue
            self._tell(ticket)
            with self._changed:
                self.waiting.appendleft(ticket)

    def _clear(self) -> None:
        for request in list(self.engine.requests):
            self.engine.remove(request)

    def _everybody(self) -> list[Ticket]:
        with self._changed:
            waiting = list(self.waiting)
        reading = [] if self.reading is None else [self.reading]
        return [*self.live.values(), *reading, *waiting]

    def _count(self) -> None:
        self.metrics.load(len(self.live), len(self.waiting), self._held())
