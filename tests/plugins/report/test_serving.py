"""The report as it is served: only with its token, and as new as the run."""

import gzip
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from es_cookbook.plugins.report.serving import report_application
from tests.plugins.report.made_runs import grow, make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", generations=2)


@pytest.fixture
def client(run: Path) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(report_application([run], 5, "token"))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:5")


async def test_the_page_may_only_request_its_own_server(client: httpx.AsyncClient) -> None:
    page = await client.get("/token/")
    version = (await client.get("/token/version")).text
    assert (page.status_code, page.headers["content-type"][:9]) == (200, "text/html")
    assert f'data-follow="{version}"' in page.text
    assert re.search("default-src 'none'.*connect-src 'self'", page.text)


@pytest.mark.parametrize("path", ["/", "/charts", "/wrong/", "/token/%2e%2e/config.json"])
async def test_other_addresses_have_nothing(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("host", ["example.org", "localhost"])
async def test_another_name_for_this_machine_is_refused(
    client: httpx.AsyncClient, host: str
) -> None:
    assert (await client.get("/token/", headers={"Host": host})).status_code == 400


async def test_additions_to_a_run_are_served_under_a_new_version(
    client: httpx.AsyncClient, run: Path
) -> None:
    before = (await client.get("/token/version")).content
    assert before == (await client.get("/token/version")).content
    grow(run, 2)
    assert (await client.get("/token/version")).content != before
    charts = json.loads(gzip.decompress((await client.get("/token/charts")).content))
    assert charts["runs"][0]["columns"]["progress/generation"] == [0, 1, 2, 2]
    run.rename(run.with_name("moved"))
    assert (await client.get("/token/charts")).status_code == 200, "a deleted run is still shown"


@pytest.mark.slow
def test_the_command_serves_at_its_address_alone_until_it_is_interrupted(run: Path) -> None:
    command = [sys.executable, "-m", "es_cookbook", "report", str(run), "watch=true"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = httpx.URL(server.stdout.readline().split()[0])
            assert len(url.path) > 30 and url.host == "127.0.0.1"
            found = [httpx.get(url.join(path)).status_code for path in ("", "charts", "/", "/x/")]
            assert found == [200, 200, 404, 404]
            assert httpx.get(url, headers={"Host": "example.org"}).status_code == 400
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode in (0, 130)
