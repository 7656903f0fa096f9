"""Plain vLLM answers from what a run exported as the run's own engine does."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks.export import vllm_answers
from es_cookbook import ES, LowRank
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.plugins.vectors.spaces import Steering
from tests.runs.export_runs import PROMPTS, engine_at, greedy, make_base, make_run

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("warm_vllm")]


def answers_of_a_run(
    run: Path, model: Path, space: SearchSpaceBuilder, output: Path, **fields: Any
) -> list[tuple[int, ...]]:
    """Train and export; gives the engine's answers."""

    async def train_and_ask() -> list[tuple[int, ...]]:
        await make_run(
            run, model, space, optimizer=ES(population_size=8, sigma=0.3, learning_rate=0.2)
        )
        async with engine_at(run, model, space) as engine:
            return [action.tokens_T for action in await greedy(engine)]

    answers = anyio.run(train_and_ask)
    export(ExportConfig(log_path=str(run), output=str(output), **fields))
    return answers


def test_a_model_its_adapters_and_low_rank_fits_answer_as_the_engine_does(tmp_path: Path) -> None:
    model = make_base(tmp_path / "base", "vllm")
    # One start of vLLM for all of them: the adapters are trained over the exported model.
    moved, whole = tmp_path / "moved", tmp_path / "whole"
    answers_of_a_run(tmp_path / "run 0", model, LowRank(), moved)
    # A Qwen2, which becomes a Llama with the vectors as biases.
    expected = {"": answers_of_a_run(tmp_path / "run", moved, Steering(), whole, merge=True)}
    adapters = {"adapter": tmp_path / "adapter", "fitted": tmp_path / "fitted"}
    space = Adapter(rank=3, alpha=12.0, exclude=("lm_head*", "*0.self_attn.q_proj*"))
    expected["adapter"] = answers_of_a_run(tmp_path / "run 2", whole, space, adapters["adapter"])
    linear = LowRank(exclude=("lm_head*",))
    expected["fitted"] = answers_of_a_run(
        tmp_path / "run 3", whole, linear, adapters["fitted"], rank=12
    )
    assert vllm_answers(whole, adapters, PROMPTS, "float32", max_tokens=12) == expected
    assert len({str(answers) for answers in expected.values()}) == 3
