"""The report as it is served: to whoever knows its token, and as new as the run."""

import contextlib
import gzip
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.report.serving import Limits, ReportServer
from tests.plugins.report.made_runs import grow, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", generations=2)


@contextlib.contextmanager
def serving(run: Path, limits: Limits | None = None) -> Generator[ReportServer]:
    with ReportServer([run], **({} if limits is None else {"limits": limits})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(run: Path) -> Generator[ReportServer]:
    with serving(run) as server:
        yield server


def get(server: ReportServer, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_the_page_is_at_its_address(server: ReportServer) -> None:
    status, page = get(server, f"/{server.token}/")
    assert status == 200
    assert f'data-follow="/{server.token}/ 0"'.encode() in page
    assert b"connect-src 'self'" in page
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"


@pytest.mark.parametrize("path", ["/", "/charts", "/wrong/", "/wrong/charts", "//", "/%00/"])
def test_without_the_token_there_is_nothing(server: ReportServer, path: str) -> None:
    status, body = get(server, path)
    assert status == 403
    assert body == b"The address of this report has a token.\n"


@pytest.mark.parametrize("host", ["example.org", "localhost", "127.0.0.1", "127.0.0.1:1"])
def test_another_name_for_this_machine_is_refused(server: ReportServer, host: str) -> None:
    assert get(server, f"/{server.token}/", host)[0] == 403


def test_there_is_nothing_beside_the_page_and_its_data(server: ReportServer) -> None:
    assert get(server, f"/{server.token}/../../config.json")[0] == 404


def test_what_a_run_adds_is_served_under_a_new_version(server: ReportServer, run: Path) -> None:
    base = f"/{server.token}/"
    assert get(server, base + "version") == (200, b"0")
    grow(run, 2)
    assert get(server, base + "version") == (200, b"1")
    charts = json.loads(gzip.decompress(get(server, base + "charts")[1]))
    assert charts["runs"][0]["columns"]["progress/generation"] == [0, 1, 2, 2]
    rollouts = json.loads(gzip.decompress(get(server, base + "rollouts")[1]))
    assert max(rollouts["columns"]["generation"]) == 2


def test_a_run_that_is_taken_away_stays_as_it_was_seen(server: ReportServer, run: Path) -> None:
    run.rename(run.with_name("moved"))
    status, charts = get(server, f"/{server.token}/charts")
    assert status == 200
    assert json.loads(gzip.decompress(charts))["runs"][0]["done"] == 2


def test_a_port_in_use_is_refused_in_a_sentence(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"),
            ReportServer([run], port),
        ):
            pass


PATIENCE = 20.0
SECRET = "what another file holds"


def sent(port: int, request: bytes, *, drips: bool = False) -> bytes:
    """All that comes of it until the server closes."""
    found = b""
    until = time.monotonic() + PATIENCE
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", port), PATIENCE) as client,
    ):
        client.sendall(request)
        client.settimeout(0.05 if drips else PATIENCE)
        while True:
            assert time.monotonic() < until, "the server never closes"
            try:
                piece = client.recv(1 << 16)
            except TimeoutError:
                assert drips
                client.sendall(b"a")
                continue
            if not piece:
                break
            found += piece
    return found


LINE = b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("request_", [b"", b"GE", LINE, LINE + b"Host: 127.0.0.1\r\n"])
def test_what_is_no_request_in_time_is_cut_off(run: Path, request_: bytes, drips: bool) -> None:
    with serving(run, Limits(seconds=0.3)) as server:
        threads = threading.active_count()
        assert sent(server.server_port, request_, drips=drips) == b""
        until = time.monotonic() + PATIENCE
        while threading.active_count() > threads and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() == threads
        assert get(server, f"/{server.token}/version") == (200, b"0")


def test_of_many_without_the_token_the_oldest_is_cut_off(run: Path) -> None:
    with contextlib.ExitStack() as open_ones, serving(run, Limits(PATIENCE, 4)) as server:
        threads = threading.active_count()
        address = "127.0.0.1", server.server_port
        clients = [
            open_ones.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(12)
        ]
        assert [client.recv(1) for client in clients[:8]] == [b""] * 8
        until = time.monotonic() + PATIENCE
        while threading.active_count() > threads + 4 and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() == threads + 4
        path = f"/{server.token}/version".encode()
        clients[-1].sendall(
            b"GET " + path + b" HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (b"127.0.0.1", address[1])
        )
        assert clients[-1].recv(100).startswith(b"HTTP/1.0 200 OK")


def test_a_slow_reader_with_the_token_gets_the_whole_page(run: Path) -> None:
    with serving(run, Limits(seconds=0.2)) as server:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(PATIENCE)
            client.connect(("127.0.0.1", server.server_port))
            host = f"Host: 127.0.0.1:{server.server_port}"
            client.sendall(f"GET /{server.token}/ HTTP/1.1\r\n{host}\r\n\r\n".encode())
            time.sleep(1)
            page = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert page.startswith(b"HTTP/1.0 200 OK") and page.rstrip().endswith(b"</html>")


STRANGE = {
    "a long line": b"GET /" + b"a" * 200_000,
    "a line of the length that is read": b"GET /" + b"a" * 16_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": LINE + b"X: " + b"x" * 200_000,
    "many headers": LINE + b"a: b\r\n" * 2_000 + b"\r\n",
    "no colon": LINE + b"Host\r\n\r\n",
    "NUL": b"GET /\0 HTTP/1.1\r\nHost: \0\r\n\r\n",
    "no text": b"GET /\xff\xfe/ HTTP/1.1\r\nHost: \xff\r\n\r\n",
    "no line": b"\r\n\r\n",
    "many words": b"GET / / / HTTP/1.1\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9999999": b"GET / HTTP/9999999.99999999999\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\n\n",
    "POST": b"POST / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 100_000,
    "Expect": LINE + b"Expect: 100-continue\r\n\r\n",
    **{
        method: f"{method} / HTTP/1.1\r\n\r\n".encode()
        for method in ("HEAD", "OPTIONS", "TRACE", "CONNECT", "setup")
    },
    "an upgrade": LINE + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "two requests": (LINE + b"\r\n") * 2,
}


@pytest.mark.parametrize("with_token", [False, True])
def test_rubbish_is_refused_without_a_traceback(
    run: Path, with_token: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(run, Limits(seconds=1.0)) as server:
        for name, request in STRANGE.items():
            own = request
            if with_token:
                own = request.replace(b" /", f" /{server.token}/".encode(), 1)
            found = sent(server.server_port, own)
            assert not found.startswith(b"HTTP") or found[9:10] in b"45", (name, found)
            assert with_token or server.token.encode() not in found
            assert b"Access-Control" not in found
            # Who goes at once leaves nothing behind, either.
            with socket.create_connection(("127.0.0.1", server.server_port)) as client:
                client.sendall(own[:1000])
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(server, f"/{server.token}/version") == (200, b"0")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name",
    ["../config.json", "..%2f..%2fconfig.json", "/etc/passwd", "%2e%2e/", "charts/../config.json"],
)
def test_no_path_leads_to_a_file(server: ReportServer, name: str) -> None:
    assert get(server, f"/{server.token}/{name}")[0] == 404


@pytest.mark.parametrize("name", ["rollouts.jsonl", "metrics.jsonl", "config.json"])
def test_a_link_out_of_the_run_is_not_followed(run: Path, tmp_path: Path, name: str) -> None:
    with serving(run) as server:
        (tmp_path / "other").write_text(json.dumps({"secret": SECRET}) + "\n")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "other")
        for path in ("version", "", "charts", "rollouts"):
            body = get(server, f"/{server.token}/{path}")[1]
            body = gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body
            assert SECRET.encode() not in body


def test_a_range_is_of_the_whole(server: ReportServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    ranges = "bytes=" + ",".join(f"{n}-{n}" for n in range(500))
    connection.request("GET", f"/{server.token}/version", headers={"Range": ranges})
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"0")
    connection.close()
