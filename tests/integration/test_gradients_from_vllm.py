"""Gradients whose answers vLLM samples: after every step it has the weights that learn."""

from pathlib import Path

import pytest

from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.plugins.gradients.grpo import main
from tests.grpo_runs import Echoes, grpo_config, metrics_of
from tests.integration.vllm_models import make_vllm_model

pytest.importorskip("psutil")  # comes with vLLM
pytest.importorskip("trl", reason="TRL is not installed: pip install 'es-cookbook[baselines]'")
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.usefixtures("warm_vllm"),
    pytest.mark.anyio,
]


async def test_trl_computes_the_log_probabilities_of_vllm_before_and_after_a_step(
    tmp_path: Path,
) -> None:
    model = make_vllm_model("qwen2", tmp_path / "model")
    engine = VLLMEngineBuilder(
        max_genomes=1,
        kv_cache_gib=0.05,
        gpu_memory_utilization=0.3,
        extra={"block_size": 32},
    )
    how = {"dataset": Echoes(turns=2), "engine": engine, "eval_every": 0, "correct_sampling": True}
    await main(grpo_config(model, tmp_path / "run", **how, attempts=8, num_generations=2))
    first, second, _ = metrics_of(tmp_path / "run")
    assert first["policy/sampling_gap"] < 1e-4
    assert first["policy/gradient_norm"] > 0
    assert second["policy/sampling_gap"] < 1e-4, "vLLM has the moved weights"
    assert second["policy/nats_per_token"] != first["policy/nats_per_token"]
