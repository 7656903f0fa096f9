"""Plain vLLM answers from what a run exported as the run's own engine does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from benchmarks.export import vllm_answers
from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.adapter import Adapter
from es_cookbook.evolution.spaces.base import SearchSpaceBuilder
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.gguf.export import write_gguf
from tests.gguf_models import make_gguf_model
from tests.runs.export_runs import PROMPTS, engine_at, greedy, make_base, make_run
from tests.runs.recorded_run import record_run
from tests.tiny_models import save_with_tokenizer

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.usefixtures("warm_vllm")]


def answers_of_a_run(
    run: Path, model: Path, space: SearchSpaceBuilder, output: Path, rank: int | None = None
) -> list[tuple[int, ...]]:
    """Train and export; gives the engine's answers."""

    async def train_and_ask() -> list[tuple[int, ...]]:
        await make_run(
            run, model, space, optimizer=ES(population_size=8, sigma=0.3, learning_rate=0.2)
        )
        async with engine_at(run, model, space) as engine:
            return [action.tokens_T for action in await greedy(engine)]

    answers = anyio.run(train_and_ask)
    export(ExportConfig(log_path=str(run), output=str(output), rank=rank))
    return answers


def test_a_model_its_adapters_and_low_rank_fits_answer_as_the_engine_does(tmp_path: Path) -> None:
    model = make_base(tmp_path / "base", "vllm")
    # One start of vLLM for all of them: the adapters are trained over the exported model.
    whole = tmp_path / "whole"
    expected = {"": answers_of_a_run(tmp_path / "run", model, LowRank(), whole)}
    adapters = {"adapter": tmp_path / "adapter", "fitted": tmp_path / "fitted"}
    space = Adapter(rank=3, alpha=12.0, exclude=("lm_head*", "*0.self_attn.q_proj*"))
    expected["adapter"] = answers_of_a_run(tmp_path / "run 2", whole, space, adapters["adapter"])
    linear = LowRank(exclude=("lm_head*",))
    expected["fitted"] = answers_of_a_run(tmp_path / "run 3", whole, linear, adapters["fitted"], 12)
    assert vllm_answers(whole, adapters, PROMPTS, "float32", max_tokens=12) == expected
    assert len({str(answers) for answers in expected.values()}) == 3


def test_the_lines_of_a_readme_load_an_adapter_on_the_base_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    tokenizer = AutoTokenizer.from_pretrained(make_gguf_model("qwen2", tmp_path / "small"))
    sizes: dict[str, Any] = {
        **{"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},  # Of 32 dimensions.
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
        "max_position_embeddings": 256,
    }
    config = Qwen2Config(vocab_size=len(tokenizer) + 3, **sizes)
    save_with_tokenizer(Qwen2ForCausalLM(config), tmp_path / "model", tokenizer)
    base, out = tmp_path / "base.gguf", tmp_path / "out"
    write_gguf(tmp_path / "model", base, "bfloat16", str(tmp_path / "model"))
    space = Adapter(rank=2, alpha=6.0, init="orthogonal", exclude=("lm_head*",))
    run = record_run(tmp_path / "run", base, space, dtype="float32")
    export(ExportConfig(log_path=str(run.path), output=str(out)))
    card = (out / "README.md").read_text()
    lines = dict(re.findall(r"^([^\n]+):\n\n```python\n(.*?)\n```$", card, re.M | re.S))
    said: dict[str, str] = {}
    for program in ("PEFT", "vLLM"):
        (tmp_path / "script.py").write_text(lines[program])
        command = [sys.executable, tmp_path / "script.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said[program] = done.stdout
    answer = said["PEFT"].removeprefix("1 + 1 =").strip()
    assert answer and answer in said["vLLM"]
