"""A bound on the size of requests, also of those that do not say how large they are."""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_train.serving.answers import error


class BodyLimit:
    """Answers 413 to requests whose body is longer than `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        body, more = b"", said.isdigit() and int(said) <= self.limit
        too_long = not more
        while more and not too_long:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more, too_long = message.get("more_body", False), len(body) > self.limit
        if too_long:
            await self._refuse(send)
            return
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self.app(scope, replay, send)

    async def _refuse(self, send: Send) -> None:
        content = json.dumps(error(f"the request is longer than {self.limit} bytes")).encode()
        headers: Any = [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": content})
