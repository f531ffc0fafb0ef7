"""A server on a real socket, in a thread of this process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import openai
import uvicorn

from dspark_train.decoding.engine import Engine
from dspark_train.decoding.loading import block_proposer
from dspark_train.serving.app import Limits, make_app
from dspark_train.serving.batching import Batcher
from dspark_train.target import Target
from tests.random_drafter import make_drafter

MODEL = "tiny"


@dataclass
class Served:
    """A running server. `client` is the official one, `http` a bare one."""

    batcher: Batcher
    server: uvicorn.Server
    client: openai.OpenAI
    http: httpx.Client
    url: str

    def idle(self, seconds: float = 20) -> bool:
        """Whether nothing is left to do, after a while at most."""
        end = time.monotonic() + seconds
        b = self.batcher
        while time.monotonic() < end:
            if not (b.live or b.waiting or b.reading):
                return True
            time.sleep(0.02)
        return False


@contextmanager
def serving(
    target: Target,
    *,
    rows: int = 4,
    api_key: str | None = None,
    limits: Limits | None = None,
    verdict: str = "rejection",
    shutdown_seconds: float = 10,
    **settings: int,
) -> Iterator[Served]:
    """Serve `target` with an untrained drafter: wrong drafts, right answers."""
    proposer = block_proposer(make_drafter(target, 4), target)
    engine = Engine(target, proposer, proposer.vocabulary, rows=rows, reads_ahead=True)
    batcher = Batcher(engine, **settings)
    app = make_app(
        batcher,
        model=MODEL,
        limits=limits or Limits(),
        verdict=verdict,
        api_key=api_key,
        shutdown_seconds=shutdown_seconds,
    )
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=int(shutdown_seconds)
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[taken]), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=60
    )
    http = httpx.Client(base_url=url, timeout=60, trust_env=False)
    try:
        yield Served(batcher, server, client, http, url)
    finally:
        client.close()
        http.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        assert not batcher.alive
