"""The report as it is served: to whoever knows its token, and as new as the run."""

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.runs.report.serving import ReportServer
from tests.runs.report.made_runs import grow, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", generations=2)


@pytest.fixture
def server(run: Path) -> Generator[ReportServer]:
    with ReportServer([run]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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
