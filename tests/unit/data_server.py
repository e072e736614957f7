"""A real HTTP server for the data tests: ranges, redirects, and on request the faults of the internet."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class DataServer:
    """`files` by path. `cuts`: for each coming answer, after how many bytes the connection breaks."""

    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    knows_ranges: bool = True
    tells_length: bool = True
    gate: threading.Event | None = None
    """Where set, each body waits for it after its first half."""
    halfway: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Range header) of every request."""
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        if self.statuses:
            request.send_error(self.statuses.pop(0))
            return
        if request.path in self.redirects:
            request.send_response(302)
            request.send_header("Location", self.redirects[request.path])
            request.end_headers()
            return
        body = self.files.get(request.path)
        if body is None:
            request.send_error(404)
            return
        first, total = 0, len(body)
        match = re.fullmatch(r"bytes=(\d+)-", wanted or "")
        if match and self.knows_ranges:
            first = int(match[1])
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        else:
            request.send_response(200)
        body = body[first:]
        if self.tells_length:
            request.send_header("Content-Length", str(len(body)))
        request.send_header("Connection", "close")
        request.end_headers()
        if self.cuts:
            body = body[: self.cuts.pop(0)]
        half = len(body) // 2
        request.wfile.write(body[:half])
        if self.gate is not None:
            self.halfway.set()
            self.gate.wait(30)
        request.wfile.write(body[half:])


@contextmanager
def serving(server: DataServer | None = None) -> Iterator[DataServer]:
    """The server at a free port of the loopback interface."""
    state = server or DataServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            pass  # the client has hung up, as some tests do

    http = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield state
    finally:
        if state.gate is not None:
            state.gate.set()
        http.shutdown()
        http.server_close()
        thread.join(10)
