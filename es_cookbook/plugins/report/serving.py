"""Serve a report to browsers on this machine, and make it again when its runs have changed.

Any local program can connect to a port, and any web page can make a browser try. So the address has
a random token, and a request must name 127.0.0.1 and the port as its host.
"""

import contextlib
import hmac
import secrets
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typing_extensions import override

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.plugins.report.writing import contents, page
from es_cookbook.runs.directory.directory import HISTORY, METRICS, ROLLOUTS

_HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves the report of some runs at `url`, on any free port.

    Raises:
        RunDirectoryError: No run can be read.
    """

    def __init__(self, log_paths: Sequence[Path], megabytes: float) -> None:
        self.token = secrets.token_urlsafe(24)
        self._files = [path / name for path in log_paths for name in (HISTORY, METRICS, ROLLOUTS)]
        self._log_paths, self._megabytes = log_paths, megabytes
        self._lock, self._seen = threading.Lock(), self._sizes()
        self._contents = contents(log_paths, megabytes=megabytes)
        super().__init__((_HOST, 0), _Handler)
        self.url = f"http://{_HOST}:{self.server_port}/{self.token}/"

    def _sizes(self) -> list[int]:
        return [file.stat().st_size if file.exists() else 0 for file in self._files]

    def latest(self) -> tuple[str, dict[str, bytes]]:
        """A version, which changes with the runs, and the contents of their report."""
        with self._lock:
            if (sizes := self._sizes()) != self._seen:
                with contextlib.suppress(RunDirectoryError):  # Deleted runs are still shown.
                    self._contents = contents(self._log_paths, megabytes=self._megabytes)
                self._seen = sizes
            return str(sum(sizes)), self._contents


class _Handler(BaseHTTPRequestHandler):
    timeout = 30
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        _, token, name = [*self.path.split("/", 2), "", ""][:3]
        is_known = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not is_known or self.headers["Host"] != f"{_HOST}:{self.server.server_port}":
            return self.send_error(403)
        version, found = self.server.latest()
        data = {**found, "version": version.encode()}
        body = data.get(name) if name else b"".join(page(found, version))
        if body is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if name else "text/html")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        with contextlib.suppress(OSError):  # The browser has closed the page.
            self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the path has the token."""
