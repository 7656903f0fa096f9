"""A run over a Ray cluster of several nodes has the history of one engine, whatever befalls nodes.

Nodes are raylets on this machine: of Ray's own test cluster, all on 127.0.0.1; or in two network
namespaces with a link between them that is cut and heals.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from tests.links import refusal
from tests.ray_fakes import LightEngineBuilder
from tests.ray_nodes import LOCAL_ONLY, PoolBuilder, history, num_recorded

# As the pool sets it for a Ray of its own, before Ray is imported.
os.environ.setdefault(LOCAL_ONLY, "0")
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.50'")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("ray")]
ROOT = Path(__file__).parents[2]
NODE: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
QUICK_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for engines, and three nodes with room for one each."""
    head = {**NODE, "num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_CHECKS}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    agents: list[psutil.Process] = []
    try:
        for _ in range(3):
            made.add_node(num_cpus=1, **NODE)
        agents += agents_of(made)
        yield made
    finally:
        agents += agents_of(made)
        ray.shutdown()
        made.shutdown()
        for agent in agents:  # They outlive a raylet that was killed.
            if agent.is_running():
                agent.kill()


def agents_of(cluster: Any) -> list[psutil.Process]:
    """What the nodes' raylets have started."""
    raylets = [node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()]
    return [
        child
        for pid in raylets
        if psutil.pid_exists(pid)
        for child in psutil.Process(pid).children(recursive=True)
    ]


def run_and_lose_the_head(log_path: str, address: str, gcs: str) -> None:
    """In a process of its own: Ray ends whoever has lost the head."""

    async def run() -> None:
        pool = PoolBuilder(num_engines=3, engine=LightEngineBuilder(), address=address)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(history, Path(log_path), pool, 100_000)
            while num_recorded(Path(log_path)) < 3:
                await asyncio.sleep(0.001)
            os.kill(int(gcs), signal.SIGKILL)

    asyncio.run(run())


async def test_a_run_over_nodes_that_die_and_join_is_the_run_on_one_engine(
    tmp_path: Path, cluster: Any
) -> None:
    """Then the head is lost too, and the run goes on where it was, on one engine."""
    alone = await history(tmp_path / "alone", LightEngineBuilder())
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    raylets = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}

    async def kill_a_node() -> None:
        """In the middle of the third generation; another joins in its place."""
        while num_recorded(tmp_path / "many") != 2:
            await asyncio.sleep(0.001)
        members = PoolBuilder.made[-1].members
        where = [psutil.Process(member.built.pid).ppid() for member in members]
        assert sorted(where) == sorted(raylets), "an engine on each node"
        while not members[1].mailbox.num_unanswered:
            await asyncio.sleep(0.0001)
        os.kill(members[1].built.pid, signal.SIGKILL)
        cluster.remove_node(raylets[where[1]], allow_graceful=False)
        while len(members) == 3:
            await asyncio.sleep(0.01)
        cluster.add_node(num_cpus=1, **NODE)

    spread: dict[str, Any] = {"strategy": "STRICT_SPREAD", "max_restarts": 0}
    pool = PoolBuilder(num_engines=3, engine=LightEngineBuilder(), **spread)
    with anyio.fail_after(90):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_a_node)
            assert await history(tmp_path / "many", pool) == alone
    ray.shutdown()

    gcs = cluster.head_node.all_processes["gcs_server"][0].process.pid
    what = f"from {__name__} import *; run_and_lose_the_head(*sys.argv[1:])"
    arguments = [str(tmp_path / "lost"), cluster.address, str(gcs)]
    environment = os.environ | {"RAY_gcs_rpc_server_reconnect_timeout_s": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; {what}", *arguments],
        cwd=ROOT,
        env=environment,
        timeout=90,
        capture_output=True,
    )
    assert ended.returncode != 0
    recorded = num_recorded(tmp_path / "lost")
    assert recorded >= 3
    longer = await history(tmp_path / "longer", LightEngineBuilder(), recorded + 3)
    assert await history(tmp_path / "lost", LightEngineBuilder(), recorded + 3) == longer


async def test_a_link_that_is_cut_and_heals_leaves_the_history_of_one_engine(
    tmp_path: Path,
) -> None:
    """First for less than Ray's health checks notice, then until they give the node up.

    Then some hundred generations leave nothing behind in that cluster: in the object store, in the
    driver, or in Ray's head, which would keep each call (4 KB) if it were to report them.
    """
    if reason := refusal():
        pytest.skip(f"network namespaces and links cannot be made here: {reason}")
    alone = await history(tmp_path / "alone", LightEngineBuilder())
    command = [sys.executable, "-m", "tests.ray_nodes", str(tmp_path / "many")]
    ended = subprocess.run(command, cwd=ROOT, timeout=180, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "many/history.jsonl").read_bytes() == alone
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["engines"] == [2, 1, 2]
    before, after = found["before"], found["after"]
    assert after["stored"] == before["stored"] and after["bytes stored"] == 0
    assert after["references"] <= 2
    assert after["driver"] - before["driver"] < 8
    assert after["head"] - before["head"] < 4
