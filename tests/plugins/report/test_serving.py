"""The report as it is served: only with its token, and as new as the run."""

import gzip
import http.client
import json
import re
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from es_cookbook.plugins.report.serving import ReportServer
from tests.plugins.report.made_runs import grow, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", generations=2)


@pytest.fixture
def server(run: Path) -> Generator[ReportServer]:
    with ReportServer([run], megabytes=5) as server:
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


def test_the_page_is_at_its_address_and_may_ask_its_server_alone(server: ReportServer) -> None:
    status, page = get(server, f"/{server.token}/")
    assert status == 200
    version = get(server, f"/{server.token}/version")[1]
    assert b'data-follow="%s"' % version in page
    assert re.search(rb"default-src 'none'.*connect-src 'self'", page)
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"


@pytest.mark.parametrize("path", ["/", "/charts", "/wrong/", "/wrong/charts", "//", "/%00/"])
def test_without_the_token_there_is_nothing(server: ReportServer, path: str) -> None:
    assert get(server, path)[0] == 403


@pytest.mark.parametrize("host", ["example.org", "localhost", "127.0.0.1", "127.0.0.1:1"])
def test_another_name_for_this_machine_is_refused(server: ReportServer, host: str) -> None:
    assert get(server, f"/{server.token}/", host)[0] == 403


def test_there_is_nothing_beside_the_page_and_its_data(server: ReportServer) -> None:
    assert get(server, f"/{server.token}/../../config.json")[0] == 404


def test_additions_to_a_run_are_served_under_a_new_version(server: ReportServer, run: Path) -> None:
    base = f"/{server.token}/"
    before = get(server, base + "version")
    assert before == get(server, base + "version")
    grow(run, 2)
    assert get(server, base + "version") != before
    charts = json.loads(gzip.decompress(get(server, base + "charts")[1]))
    assert charts["runs"][0]["columns"]["progress/generation"] == [0, 1, 2, 2]
    run.rename(run.with_name("moved"))
    assert get(server, base + "charts")[0] == 200, "a deleted run is still shown"
