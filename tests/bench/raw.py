"""A server that sends what a test says, byte for byte, and notes what it is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Raw:
    url: str
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


Answer = Callable[[dict[str, Any]], tuple[int, Sequence[bytes]]]
"""From a body to status and lines; the connection is closed after them."""


@contextmanager
def answering(answer: Answer) -> Iterator[Raw]:
    raw = Raw("")

    class Once(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            raw.paths.append(self.path)
            raw.bodies.append(body)
            raw.headers.append({name.lower(): value for name, value in self.headers.items()})
            status, lines = answer(body)
            self.send_response(status)
            self.end_headers()
            for line in lines:
                self.wfile.write(line + b"\n")
                self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Once)
    raw.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield raw
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n"
