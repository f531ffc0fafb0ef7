"""A bound on the size of requests, also of those that do not say how large they are."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_train.serving.answers import error


class BodyLimit:
    """Answers 413 to requests whose body is longer than `limit` bytes.

    A connection that is closed while its client still sends is reset by the kernel, and the client
    never reads the answer. So what still comes after the answer is read and thrown away for a while
    (a lingering close).

    Args:
        app: gets the others, with their whole body.
        limit: bytes.
        linger_bytes: thrown away after the answer, at most.
        linger_seconds: spent on that, at most; then the connection is closed all the same.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit: int,
        linger_bytes: int = 1 << 28,
        linger_seconds: float = 10.0,
    ) -> None:
        self.app, self.limit = app, limit
        self.linger_bytes, self.linger_seconds = linger_bytes, linger_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        body, more = bytearray(), True
        too_long = not said.isdigit() or int(said) > self.limit
        while more and not too_long:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more, too_long = message.get("more_body", False), len(body) > self.limit
        if too_long:
            await self._refuse(send)
            if more:
                await self._linger(receive)
            await send({"type": "http.response.body", "body": b""})  # the end: now it is closed
            return
        given = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self.app(scope, replay, send)

    async def _refuse(self, send: Send) -> None:
        """A whole answer, after which the connection stays open."""
        content = json.dumps(error(f"the request is longer than {self.limit} bytes")).encode()
        headers: Any = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})

    async def _linger(self, receive: Receive) -> None:
        left = self.linger_bytes
        try:
            async with asyncio.timeout(self.linger_seconds):
                while left > 0:
                    message = await receive()
                    if not message.get("more_body", False):  # all of it, or the client has gone
                        return
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return
