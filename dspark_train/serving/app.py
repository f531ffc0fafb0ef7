"""OpenAI-compatible HTTP over a batcher."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from dspark_train.decoding.admission import admit
from dspark_train.decoding.sampling import VerdictName
from dspark_train.serving.answers import Answer, error
from dspark_train.serving.batching import Batcher
from dspark_train.serving.body import BodyLimit
from dspark_train.serving.calls import Call, FailedError
from dspark_train.serving.protocol import ChatRequest, CompletionRequest, Sampling, StreamOptions
from dspark_train.serving.tickets import QueueFullError, StoppedError

JSON_ERRORS = {429: "rate_limit_error", 401: "authentication_error", 503: "server_error"}


@dataclass(frozen=True)
class Limits:
    """What one client may ask of the server.

    Attributes:
        max_new_tokens: per choice.
        max_prompt_tokens: per prompt.
        max_choices: prompts × n of one request.
        max_body_bytes: of a request.
        timeout: seconds until an answer must be complete.
    """

    max_new_tokens: int = 2048
    max_prompt_tokens: int = 8192
    max_choices: int = 16
    max_body_bytes: int = 1 << 20
    timeout: float = 600.0


def make_app(
    batcher: Batcher,
    *,
    model: str,
    limits: Limits = Limits(),
    verdict: VerdictName = "rejection",
    api_key: str | None = None,
    shutdown_seconds: float = 30.0,
) -> FastAPI:
    """The application. It starts the batcher and closes it.

    Args:
        batcher: not started.
        model: name under which the target is served.
        limits: what a client may ask.
        verdict: how drafts of all requests are judged.
        api_key: that clients must give; None: no key is needed.
        shutdown_seconds: for what is running when the server ends.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await asyncio.to_thread(batcher.close, finish=True, timeout=shutdown_seconds)

    app = FastAPI(title="dspark_train", lifespan=lifespan, openapi_url=None)
    app.add_middleware(BodyLimit, limit=limits.max_body_bytes)
    target, vocabulary = batcher.engine.target, batcher.engine.vocabulary

    async def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    def build(asked: Sampling) -> tuple[Answer, list]:
        """The requests of all choices, or an error that says why not."""
        if asked.model != model:
            raise HTTPException(404, f"model {asked.model!r} is not served, only {model!r}")
        wanted = asked.wanted or limits.max_new_tokens
        if wanted > limits.max_new_tokens:
            most = limits.max_new_tokens
            raise HTTPException(400, f"max_tokens={wanted}, at most {most} are allowed here")
        count = len(asked.prompts) * asked.n
        if not 1 <= count <= limits.max_choices:
            most = limits.max_choices
            raise HTTPException(400, f"{count} choices asked for, 1 to {most} are allowed here")
        requests = []
        for prompt in asked.prompts:
            for _ in range(asked.n):
                settings = replace(asked.settings(len(requests)), verdict=verdict)
                request = admit(
                    target,
                    vocabulary or target.vocab_size,
                    prompt,
                    wanted,
                    settings,
                    asked.stops,
                    logprobs=asked.alternatives,
                )
                if request.prompt_length > limits.max_prompt_tokens:
                    raise HTTPException(
                        400,
                        f"the prompt has {request.prompt_length} tokens, at most "
                        f"{limits.max_prompt_tokens} are allowed here",
                    )
                requests.append(request)
        chat = isinstance(asked, ChatRequest)
        return Answer(chat, model, target.tokenizer, requests, len(asked.prompts)), requests

    async def answer(asked: Sampling, http: Request) -> Response:
        try:
            frame, requests = await asyncio.to_thread(build, asked)
        except ValueError as wrong:
            raise HTTPException(400, str(wrong)) from wrong
        try:
            call = Call(batcher, requests)
        except QueueFullError:
            raise HTTPException(
                429, "too many requests wait already: try again later", {"Retry-After": "1"}
            ) from None
        except StoppedError:
            raise HTTPException(503, "the server is shutting down") from None
        if asked.stream:
            return Events(stream(asked, frame, call), call)
        try:
            async with asyncio.timeout(limits.timeout):
                texts, ends = await call.whole(http)
        except TimeoutError:
            raise HTTPException(504, f"no answer within {limits.timeout:g} seconds") from None
        except FailedError as failed:
            raise HTTPException(failed.status, str(failed)) from failed
        finally:
            call.close()
        return JSONResponse(frame.whole(texts, ends))

    async def stream(asked: Sampling, frame: Answer, call: Call) -> AsyncIterator[str]:
        wished = asked.stream_options or StreamOptions()
        try:
            if frame.chat:
                for index in range(len(frame.requests)):
                    yield event(frame.opening(index))
            async with asyncio.timeout(limits.timeout):
                async for index, p in call.progress():
                    piece = frame.piece(index, p.text, p.start, p.stop, p.end)
                    usage = {"usage": frame.usage()} if wished.continuous_usage_stats else {}
                    yield event(piece | usage)
            if wished.include_usage:
                yield event(frame.last())
            yield "data: [DONE]\n\n"
        except TimeoutError:
            yield event(error(f"no answer within {limits.timeout:g} seconds", "server_error"))
        except FailedError as failed:
            yield event(error(str(failed), "server_error"))

    @app.post("/v1/chat/completions", dependencies=[Depends(authorised)])
    async def chat(asked: ChatRequest, http: Request) -> Response:
        return await answer(asked, http)

    @app.post("/v1/completions", dependencies=[Depends(authorised)])
    async def completions(asked: CompletionRequest, http: Request) -> Response:
        return await answer(asked, http)

    @app.get("/v1/models", dependencies=[Depends(authorised)])
    async def models() -> dict[str, Any]:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "dspark_train"}
        return {"object": "list", "data": [entry]}

    @app.get("/metrics", dependencies=[Depends(authorised)])
    async def metrics() -> Response:
        return Response(batcher.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/health")
    async def health() -> Response:
        fine = batcher.alive
        return JSONResponse({"status": "ok" if fine else "stopped"}, 200 if fine else 503)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, wrong: RequestValidationError) -> Response:
        said = "; ".join(
            f"{'.'.join(str(part) for part in one['loc'][1:])}: {one['msg']}"
            for one in wrong.errors()
        )
        return JSONResponse(error(said), 400)

    @app.exception_handler(StarletteHTTPException)  # those of unknown paths and methods, too
    async def refused(_: Request, wrong: StarletteHTTPException) -> Response:
        kind = JSON_ERRORS.get(wrong.status_code, "invalid_request_error")
        return JSONResponse(error(wrong.detail, kind), wrong.status_code, headers=wrong.headers)

    return app


class Events(StreamingResponse):
    """Server-sent events that let go of the call however they end, even before they begin."""

    def __init__(self, pieces: AsyncIterator[str], call: Call) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self.call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.close()


def event(content: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
