"""Serve a report to browsers on this machine, and make it again when its runs have changed.

Any local program can connect to a port, and any web page can make a browser try. So the address has
a random token, and a request must name 127.0.0.1 as its host.
"""

import contextlib
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.plugins.endpoint.server import serve_at
from es_cookbook.plugins.report.writing import contents, page
from es_cookbook.runs.directory.directory import HISTORY, METRICS, ROLLOUTS

_HOST = "127.0.0.1"


async def watch(log_paths: Sequence[Path], megabytes: float) -> None:
    """Serve the report of some runs on any free port, which is printed, until Ctrl-C.

    Raises:
        RunDirectoryError: No run can be read.
    """
    token = secrets.token_urlsafe(24)
    application = report_application(log_paths, megabytes, token)
    with socket.create_server((_HOST, 0)) as bound:
        url = f"http://{_HOST}:{bound.getsockname()[1]}/{token}/"
        print(f"{url} shows the runs until Ctrl-C", flush=True)
        await serve_at(bound, application, until_signal=True)


def report_application(log_paths: Sequence[Path], megabytes: float, token: str) -> Starlette:
    """Return the application: the page at `/<token>/`, its data and their `version`.

    Raises:
        RunDirectoryError: No run can be read.
    """
    files = [path / name for path in log_paths for name in (HISTORY, METRICS, ROLLOUTS)]

    def sizes() -> list[int]:
        return [file.stat().st_size if file.exists() else 0 for file in files]

    seen, found = sizes(), contents(log_paths, megabytes=megabytes)

    async def answer(request: Request) -> Response:
        nonlocal seen, found
        if (now := sizes()) != seen:
            with contextlib.suppress(RunDirectoryError):  # Deleted runs are still shown.
                found = contents(log_paths, megabytes=megabytes)
            seen = now
        name, version = request.path_params["name"], str(sum(seen))
        data = {**found, "version": version.encode()}
        body = data.get(name) if name else b"".join(page(found, version))
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        kind = "application/octet-stream" if name else "text/html"
        return Response(body, 404 if body is None else 200, headers, kind)

    return Starlette(
        routes=[Route(f"/{token}/{{name:path}}", answer)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[_HOST])],
    )
