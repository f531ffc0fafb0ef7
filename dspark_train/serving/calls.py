"""One request of a client: its choices in the batcher, heard from the event loop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from fastapi import Request as HttpRequest

from dspark_train.decoding.request import Request
from dspark_train.serving.batching import Batcher
from dspark_train.serving.tickets import Progress, QueueFullError, StoppedError, Ticket


class FailedError(Exception):
    """A choice did not come to its end."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Call:
    """Submits all choices or none. `close` it, however it ends.

    Raises:
        QueueFullError, StoppedError: nothing was taken.
    """

    def __init__(self, batcher: Batcher, requests: Sequence[Request]) -> None:
        self.batcher, self.requests = batcher, requests
        self.heard: asyncio.Queue[tuple[int, Progress]] = asyncio.Queue()
        self.open = set(range(len(requests)))
        self.tickets: list[Ticket] = []
        loop = asyncio.get_running_loop()

        def listen(index: int, progress: Progress) -> None:
            with suppress(RuntimeError):  # the loop is gone, and with it whoever would listen
                loop.call_soon_threadsafe(self.heard.put_nowait, (index, progress))

        try:
            for index, request in enumerate(requests):
                sink = lambda progress, index=index: listen(index, progress)  # noqa: E731
                self.tickets.append(batcher.submit(request, sink))
        except (QueueFullError, StoppedError):
            self.close()
            raise

    async def progress(self) -> AsyncIterator[tuple[int, Progress]]:
        """What is new, choice by choice, until all have ended.

        Raises:
            FailedError: one of them failed.
        """
        while self.open:
            index, progress = await self.heard.get()
            if progress.end in ("failed", "cancelled"):
                stopping = "shutting down" in (progress.error or "")
                raise FailedError(progress.error or "cancelled", 503 if stopping else 500)
            if progress.end is not None:
                self.open.discard(index)
            yield index, progress

    async def whole(self, http: HttpRequest) -> tuple[list[str], list[str]]:
        """Texts and ends of all choices; a client that goes away ends it early.

        Raises:
            FailedError: one of them failed, or nobody listens any more.
        """
        texts, ends = [""] * len(self.requests), [""] * len(self.requests)

        async def collect() -> None:
            async for index, progress in self.progress():
                texts[index] += progress.text
                ends[index] = progress.end or ends[index]

        collecting = asyncio.ensure_future(collect())
        leaving = asyncio.ensure_future(_gone(http))
        try:
            await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                raise FailedError("the client went away", 499)
            collecting.result()
        finally:
            for task in (collecting, leaving):
                task.cancel()
            await asyncio.gather(collecting, leaving, return_exceptions=True)
        return texts, ends

    def close(self) -> None:
        """Let go of everything that has not ended."""
        for index, ticket in enumerate(self.tickets):
            if index in self.open:
                self.batcher.cancel(ticket)


async def _gone(http: HttpRequest) -> None:
    """Returns when the client has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
