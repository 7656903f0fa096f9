"""The report, served to browsers of this machine, and made anew while runs go on.

Any program here can connect to a port, and any web page can make a browser try. So the address has
a random token, without which nothing is answered but 403, and a request must name the address as
its host: a name of somebody's own that leads to 127.0.0.1 is refused.

Who has not sent a request after `Limits.seconds` is cut off, and of those that have not shown the
token the oldest when there are too many; a thread each would be left waiting otherwise.

A run's files are looked at when the page asks whether something is new, and read again only then,
at most half of the time.
"""

import contextlib
import dataclasses
import hmac
import io
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeAlias

from typing_extensions import override

from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.plugins.report.writing import MEGABYTES, contents, page
from es_cookbook.runs.directory.directory import CONFIG, HISTORY, METRICS, ROLLOUTS
from es_cookbook.runs.directory.lock import writer_of

HOST = "127.0.0.1"
_MOST_HEAD = 16 << 10
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_Request: TypeAlias = socket.socket | tuple[bytes, socket.socket]
"""As socketserver has it: here always a socket."""
_HTML = "text/html; charset=utf-8"
_BYTES = "application/octet-stream"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What is granted to connections.

    Attributes:
        seconds: for a request, and for the refusal of one.
        strangers: connections that have not shown the token.
        answer: seconds for an answer, which is all of a report.
    """

    seconds: float = 8.0
    strangers: int = 64
    answer: float = 600.0


class ReportServer(ThreadingHTTPServer):
    """Serves the report of some runs at `url`, until it is shut down; closes as a context manager.

    The port is any free one if 0.

    Raises:
        RunDirectoryError: No run can be read.
        ConfigError: The port is in use, or not to be had.
    """

    daemon_threads = True
    request_queue_size = 128  # With 5 a browser waits for seconds where many connect.

    def __init__(
        self,
        log_paths: Sequence[Path],
        port: int = 0,
        megabytes: float = MEGABYTES,
        limits: Limits = Limits(),
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.latest = _Latest(log_paths, megabytes)
        self.limits = limits
        self._strangers: dict[_Request, float] = {}
        self._changing = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used ({error.strerror or error}); give another "
                "one, or port=0 for any that is free"
            ) from error

    @override
    def process_request(self, request: _Request, client_address: object) -> None:
        with self._changing:
            self._strangers[request] = time.monotonic() + self.limits.seconds
            if len(self._strangers) > self.limits.strangers:
                self._cut_off(next(iter(self._strangers)))
        super().process_request(request, client_address)

    @override
    def service_actions(self) -> None:
        """Called after each request, and while there is none."""
        with self._changing:
            for request, until in tuple(self._strangers.items()):
                if time.monotonic() < until:
                    break  # They are in order.
                self._cut_off(request)

    @override
    def shutdown_request(self, request: _Request) -> None:
        self.token_is_right(request)
        super().shutdown_request(request)

    @override
    def handle_error(self, request: _Request, client_address: object) -> None:
        """A client that has gone is nobody's failure."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def token_is_right(self, request: _Request) -> None:
        """It may take its time."""
        with self._changing:
            self._strangers.pop(request, None)

    def _cut_off(self, request: _Request) -> None:
        """Its thread finds that nothing more comes, and closes it."""
        del self._strangers[request]
        assert isinstance(request, socket.socket)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    @property
    def url(self) -> str:
        """What a browser opens."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"


class _Latest:
    """The contents of a report, as new as its last reader asked for."""

    def __init__(self, log_paths: Sequence[Path], megabytes: float) -> None:
        self._log_paths = log_paths
        self._megabytes = megabytes
        self._lock = threading.Lock()
        self._seen = self._look()
        self._contents = contents(log_paths, megabytes=megabytes)
        self._version = 0
        self._not_before = 0.0

    def get(self) -> tuple[int, dict[str, bytes]]:
        """A number that changes with the contents, and those."""
        with self._lock:
            seen = self._look()
            if seen != self._seen and time.monotonic() >= self._not_before:
                began = time.monotonic()
                with contextlib.suppress(RunDirectoryError):  # Gone; what was there is still shown.
                    self._contents = contents(self._log_paths, megabytes=self._megabytes)
                    self._version += 1
                self._seen = seen
                self._not_before = 2 * time.monotonic() - began
            return self._version, self._contents

    def _look(self) -> list[object]:
        names = (CONFIG, HISTORY, METRICS, ROLLOUTS)
        files = [_stamp(path / name) for path in self._log_paths for name in names]
        return [*files, *(writer_of(path) for path in self._log_paths)]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


class _Handler(BaseHTTPRequestHandler):
    timeout = 30
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]

    @override
    def setup(self) -> None:
        """Read a head of limited size; nothing here has a body, and a connection one request."""
        super().setup()
        head = b""
        while not _END_OF_HEAD.search(head):
            piece = self.connection.recv(4096)
            head += piece
            if not piece or len(head) > _MOST_HEAD:
                raise ConnectionAbortedError("no request")
        self.rfile = io.BytesIO(head)

    def do_GET(self) -> None:
        """Answer who knows the token, and refuse everybody else."""
        _, token, name = [*self.path.partition("?")[0].split("/", 2), "", ""][:3]
        host = f"{HOST}:{self.server.server_port}"
        knows = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not knows or self.headers.get("Host") != host:
            self._send(403, "text/plain", b"The address of this report has a token.\n")
            return
        self.server.token_is_right(self.connection)
        self.connection.settimeout(self.server.limits.answer)
        version, found = self.server.latest.get()
        match name:
            case "":
                follow = f"/{self.server.token}/ {version}"
                self._send(200, _HTML, b"".join(page(found, follow)))
            case "version":
                self._send(200, "text/plain", str(version).encode())
            case "charts" | "rollouts":
                self._send(200, _BYTES, found[name])
            case _:
                self._send(404, "text/plain", b"There is nothing here.\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the token would be in it."""
