"""Gradients whose answers vLLM samples: after every step it has the weights that learn."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.vllm.engine import VLLMEngineBuilder
from es_cookbook.engines.vllm.host import VLLMEngine
from es_cookbook.plugins.gradients.checkpoints import latest_checkpoint
from es_cookbook.plugins.gradients.grpo import main
from es_cookbook.rl.types import Action
from tests.grpo_runs import CopierBuilder, Echoes, grpo_config, metrics_of
from tests.integration.vllm_models import make_vllm_model

pytest.importorskip("psutil")  # comes with vLLM
pytest.importorskip("trl", reason="TRL is not installed: pip install 'es-cookbook[baselines]'")
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("warm_vllm")]


async def test_trl_learns_from_the_log_probabilities_of_vllm_before_and_after_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first answers are the base's, those of the second the checkpoint's."""
    answers: list[tuple[SampleRequest, Action]] = []
    sample = VLLMEngine.sample

    async def kept(engine: VLLMEngine, request: SampleRequest) -> Action:
        answers.append((request, await sample(engine, request)))
        return answers[-1][1]

    monkeypatch.setattr(VLLMEngine, "sample", kept)
    model = make_vllm_model("qwen2", tmp_path / "model")
    engine = VLLMEngineBuilder(
        max_genomes=1, kv_cache_gib=0.05, gpu_memory_utilization=0.3, extra={"block_size": 32}
    )
    how = {"dataset": Echoes(turns=2), "engine": engine, "eval_every": 0, "checkpoint_every": 1}
    how |= {"trackers": CopierBuilder(generations=1), "attempts": 8, "num_generations": 2}
    await main(grpo_config(model, tmp_path / "run", **how))
    moved = latest_checkpoint(tmp_path / "copy")
    assert moved is not None
    assert metrics_of(tmp_path / "run")[0]["policy/gradient_norm"] > 0
    base, after = map(AutoModelForCausalLM.from_pretrained, (model, moved.model))
    half = len(answers) // 2
    assert half == 2 * 8 * 2, "problems, attempts and turns"
    assert max(gap(base, *answer) for answer in answers[:half]) < 1e-3
    assert max(gap(after, *answer) for answer in answers[half:]) < 1e-3
    assert max(gap(base, *answer) for answer in answers[half:]) > 1e-2, "it has moved"


def gap(model: PreTrainedModel, request: SampleRequest, answer: Action) -> float:
    """The largest difference of the answer's log-probabilities from those of the model."""
    prompt_T, found_T = request.observation.tokens_T, answer.logprobs_T
    assert found_T is not None
    with torch.no_grad():
        logprobs = model(torch.tensor([[*prompt_T, *answer.tokens_T]])).logits[0].log_softmax(-1)
    of_next_T = enumerate(answer.tokens_T, len(prompt_T) - 1)
    expected_T = [float(logprobs[at, token]) for at, token in of_next_T]
    return max(abs(a - b) for a, b in zip(expected_T, found_T, strict=True))
