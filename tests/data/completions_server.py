"""A real HTTP server of OpenAI's completions that records what it is asked and misbehaves."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
# given the request and its number: the body of the answer, or the name of a misbehaviour
Behaviour = Callable[[Body, int], Body | str]


class CompletionsServer:
    """Serves on a free port until it is closed.

    Attributes:
        url: base of the API.
        requests: bodies in the order of arrival, with the header `authorization` beside them.
        most: requests that were open at the same time, at most.
    """

    def __init__(self, behaviour: Behaviour) -> None:
        self.requests: list[tuple[Body, str | None]] = []
        self.open = self.most = 0
        self.lock, self.previous = threading.Lock(), None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append((body, self.headers["Authorization"]))
                    outer.open += 1
                    outer.most = max(outer.most, outer.open)
                try:
                    self.answer(
                        behaviour(body, number) if self.path == "/v1/completions" else "404"
                    )
                finally:
                    with outer.lock:
                        outer.open -= 1

            def answer(self, what: Body | str) -> None:
                if what == "timeout":
                    outer.released.wait(5)
                    return
                if what == "duplicate":  # the answer to the request before
                    what = outer.previous or "500"
                if what in ("404", "400", "429", "500"):
                    self.reply(int(what), b'{"error": "as commanded"}')
                    return
                content = b"{]" if what == "garbage" else json.dumps(what).encode()
                if what == "cut":
                    self.send_response(200)
                    self.send_header("Content-Length", "10000")
                    self.end_headers()
                    self.wfile.write(b'{"choices": [')
                    self.close_connection = True
                    return
                if isinstance(what, dict):
                    outer.previous = what
                self.reply(200, content)

            def reply(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.released = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
