"""A body that is too long: its sender gets the answer, and is cut if it never ends."""

import concurrent.futures
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import uvicorn

from dspark_train.serving.body import BodyLimit

LIMIT = 1000


async def length(scope, receive, send) -> None:
    """Answers how many bytes it was given."""
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


@contextmanager
def listening(app):
    """`app` on a socket of this machine; its port."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=lambda: server.run(sockets=[taken]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield taken.getsockname()[1]
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
    taken.close()


def pieces(count: int, size: int = 1 << 16):
    for i in range(count):
        if i % 8 == 0:
            time.sleep(0.003)
        yield b"x" * size


def test_every_sender_of_too_much_gets_its_answer() -> None:
    """Fast and slow, with and without a Content-Length, eight at a time."""
    with listening(BodyLimit(length, LIMIT)) as port:
        url = f"http://127.0.0.1:{port}/"

        def send(turn: int) -> int:
            said = {"Content-Length": str(24 << 16)} if turn % 2 else {}
            body = b"x" * (24 << 16) if turn % 4 < 2 else pieces(24)
            with httpx.Client(trust_env=False, timeout=60) as client:
                return client.post(url, content=body, headers=said).status_code

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert set(pool.map(send, range(56))) == {413}
        assert httpx.post(url, content=b"x" * LIMIT, trust_env=False).text == str(LIMIT)
        assert httpx.post(url, content=b"", trust_env=False).text == "0"


@pytest.mark.parametrize("bound", [{"linger_bytes": 1 << 20}, {"linger_seconds": 0.5}])
@pytest.mark.parametrize("said", ["Content-Length: 999999999999", "Transfer-Encoding: chunked"])
def test_a_sender_that_never_ends_is_cut(bound, said) -> None:
    chunk = b"x" * 65536
    framed = chunk if said.startswith("Content") else b"10000\r\n" + chunk + b"\r\n"
    with listening(BodyLimit(length, LIMIT, **bound)) as port:
        began, sent = time.monotonic(), 0
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.settimeout(20)
            raw.sendall(f"POST / HTTP/1.1\r\nHost: x\r\n{said}\r\n\r\n".encode())
            try:
                while time.monotonic() < began + 30:
                    raw.sendall(framed)
                    sent += len(chunk)
                    if "linger_seconds" in bound:
                        time.sleep(0.01)
            except (ConnectionResetError, BrokenPipeError):
                pass
        assert time.monotonic() - began < 25
        # what the sockets of both sides hold comes on top
        assert "linger_bytes" not in bound or sent < (32 << 20)
