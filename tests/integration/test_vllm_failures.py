"""When real vLLM fails: one sentence with the cause, and pages of traceback only in the log."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from es_cookbook import LowRank, VLLMEngineBuilder
from es_cookbook.common.errors import EngineError
from es_cookbook.evolution.genome import Genome
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from tests.engines.running import Running
from tests.engines.torch.reference import request
from tests.integration.vllm_models import make_vllm_model
from tests.said import whole_lines

psutil = pytest.importorskip("psutil")  # comes with vLLM
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("warm_vllm")]

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"kv_cache_gib": 0.05, "gpu_memory_utilization": 0.3}
RUN = """
import chz
from es_cookbook.common.cli import run_cli
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.recipes.countdown.train_cli import CLIConfig, main

def fail(config):
    processors = ["tests.integration.failing_processor:FailingProcessor"]
    engine = VLLMEngineBuilder(kv_cache_gib=0.05, extra={"logits_processors": processors})
    main(chz.replace(config, engine=engine))

if __name__ == "__main__":
    run_cli(fail, CLIConfig)
"""


def test_a_run_whose_vllm_fails_says_why_and_leaves_the_rest_in_its_log(tmp_path: Path) -> None:
    """In processes of their own, as a user has them."""
    script, run = tmp_path / "run.py", tmp_path / "run"
    script.write_text(RUN)
    silent = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = subprocess.run(
        [sys.executable, script, f"log_path={run}", "num_generations=1"],
        env=silent | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert whole_lines(done.stderr) == [
        f"{run}: loading {BUNDLED_MODEL} on vllm",
        "starting vLLM, which takes 10 to 30 s, and longer for a large model",
        "checking 4,000 training problems",
        "evaluating 500 held-out problems before the first generation",
        f"what is known of this failure is in {run / 'log.txt'}",
        "vLLM failed: ArithmeticError: no logits today",
    ]
    log = (run / "log.txt").read_text()
    assert "failing_processor.py" in log and "in run_busy_loop" in log, "vLLM's own traceback"


def test_a_killed_process_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)  # or vLLM's own words would be shown
    path = make_vllm_model("qwen2", tmp_path / "model")
    before = set(psutil.Process().children(recursive=True))
    with Running(VLLMEngineBuilder(max_genomes=1, **SMALL), path, LowRank()) as running:
        running.load([Genome()])
        started = set(psutil.Process().children(recursive=True)) - before
        vllms = [p for p in started if not p.children() and not _is_tracker(p)]
        assert vllms

        async def kill_under_way() -> None:
            tasks = [
                asyncio.create_task(running.engine.sample(request(0, (5,), max_tokens=90)))
                for _ in range(4)
            ]
            await asyncio.sleep(0.02)
            for process in vllms:
                os.kill(process.pid, signal.SIGKILL)
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, EngineError)
                assert str(result) in (
                    "vLLM failed: its process ended without a word, perhaps killed for its memory",
                    "vLLM gave a request up: the engine was closed, or has failed",
                )

        running.portal.call(kill_under_way)
        with pytest.raises(EngineError):
            running.sample([request(0, (5,))])


def _is_tracker(process: Any) -> bool:
    """Of multiprocessing's resources, which comes with the first process that is started."""
    return "resource_tracker" in "".join(process.cmdline())
