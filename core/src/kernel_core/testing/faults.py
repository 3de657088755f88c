"""A proxy on loopback that stands between a client and a store's server, and misbehaves as it is told."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit


@dataclass
class Request:
    """A request as it came in.

    Attributes:
        method: ``GET``, ``PUT``, ….
        path: Path and query.
        size: Of the body, in bytes.
    """

    method: str
    path: str
    size: int


@dataclass
class Fault:
    """What happens to requests.

    Attributes:
        kind: ``status`` answers without asking the server; ``reset`` breaks the connection before, ``lost`` after the
            server did what was asked; ``hang`` never answers; ``truncate`` breaks off in the middle of the body.
        status: The status to answer with.
        body: And the body.
        headers: And these headers.
        times: How many requests it happens to; None for all.
        matches: To which ones.
    """

    kind: Literal["status", "reset", "lost", "hang", "truncate"]
    status: int = 503
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    times: int | None = None
    matches: Callable[[Request], bool] = lambda request: True


class FaultProxy:
    """The proxy. ``with FaultProxy("http://127.0.0.1:5000") as proxy:`` starts and stops it.

    Args:
        target: URL of the server that answers.

    Attributes:
        requests: What came in, in order.
        fault: What is happening at the moment.
    """

    def __init__(self, target: str) -> None:
        self.target = urlsplit(target)
        self.requests: list[Request] = []
        self.fault: Fault | None = None
        self.hit = 0  # requests that the fault happened to
        self._lock = threading.Lock()
        self._closing = threading.Event()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Let ``fault`` happen inside the ``with`` block."""
        self.fault, self.hit = fault, 0
        try:
            yield
        finally:
            self.fault = None

    def fault_for(self, request: Request) -> Fault | None:
        """Note a request and say what happens to it."""
        with self._lock:
            self.requests.append(request)
            fault = self.fault
            if fault is None or not fault.matches(request) or (fault.times is not None and self.hit >= fault.times):
                return None
            self.hit += 1
            return fault

    def wait_until_closed(self, timeout_s: float = 30.0) -> None:
        """Block for as long as a hanging request hangs."""
        self._closing.wait(timeout_s)


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms
    wbufsize = 2**16

    def handle_any(self) -> None:
        """Pass the request on, or not."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client has gone; a server would wait for the rest
            self.close_connection = True
            return
        fault = self.proxy.fault_for(Request(self.command, self.path, len(body)))
        if fault is None:
            self._answer(*self._forward(body))
        elif fault.kind == "status":
            self._answer(fault.status, fault.headers, fault.body)
        elif fault.kind == "truncate":
            self._answer(*self._forward(body), cut=True)
        else:
            if fault.kind == "lost":
                self._forward(body)
            if fault.kind == "hang":
                self.proxy.wait_until_closed()
            self._reset()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        target = self.proxy.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP}
            if self.command == "HEAD" and (size := answer.getheader("Content-Length")):
                kept["Content-Length"] = size
            return answer.status, kept, content
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        if "Content-Length" not in headers and status not in (204, 304):
            headers = {**headers, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.wfile.flush()
        if cut:
            self._reset(hard=False)

    def _reset(self, hard: bool = True) -> None:
        self.close_connection = True
        if hard:  # closing sends RST, not FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def finish(self) -> None:
        """Close the connection, which may be broken."""
        with suppress(OSError):
            super().finish()

    def handle(self) -> None:
        """Answer until the client has gone, or the connection was broken on purpose."""
        with suppress(OSError, ValueError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
