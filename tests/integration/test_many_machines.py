"""A run over a Ray cluster of two hosts has the history of one engine, whatever befalls it.

Hosts are network namespaces of this machine, with a link between them that is cut and heals.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.links import refusal
from tests.programs import num_recorded
from tests.ray_fakes import LightEngineBuilder
from tests.ray_nodes import history

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.50'")
pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("ray")]
ROOT = Path(__file__).parents[2]


async def test_a_run_whose_link_nodes_and_head_are_lost_has_the_history_of_one_engine(
    tmp_path: Path,
) -> None:
    """The link for less than Ray's health checks notice, then until they give the node up.

    Before that, some hundred generations leave nothing behind in that cluster: in the object store,
    in the driver, or in Ray's head, which would keep each call (4 KB) if it were to report them.
    """
    if reason := refusal():
        pytest.skip(f"network namespaces and links cannot be made here: {reason}")
    engine = LightEngineBuilder()
    alone = await history(tmp_path / "alone", engine)
    command = [sys.executable, "-m", "tests.ray_nodes", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, timeout=400, capture_output=True, text=True)
    assert (tmp_path / "many/history.jsonl").read_bytes() == alone, ended.stderr
    found = json.loads(re.findall(r"^{.*}$", ended.stdout, re.MULTILINE)[0])
    assert found["engines"] == [2, 1, 2, 1]
    before, after = found["before"], found["after"]
    assert after["stored"] == before["stored"] and after["bytes stored"] == 0
    assert after["references"] <= 2
    assert after["driver"] - before["driver"] < 8
    assert after["head"] - before["head"] < 4
    assert ended.returncode != 0, "who has lost the head ends"
    recorded = num_recorded(tmp_path / "lost")
    assert recorded >= 3
    longer = await history(tmp_path / "longer", engine, recorded + 3)
    assert await history(tmp_path / "lost", engine, recorded + 3) == longer
