"""The guide to base models and the page of custom tasks, typed from an empty folder.

A tiny model stands in for the pages' models, and runs are short. Each line that the guide shows as
printed begins as one that the command before it prints.
"""

import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from es_cookbook import ES, Config, RLDatasetBuilder, SamplingParams
from es_cookbook.runs.program import run as run_config
from tests.chat_server import chat_server
from tests.chat_templates import CHATML, tokenizer_with
from tests.said import typed
from tests.test_docs_blocks import BLOCKS, Block, command_lines
from tests.tiny_models import save_with_tokenizer

GUIDE = "docs/base_models.md"
TASKS = "docs/tasks.md"
SHORT = ("optimizer.population_size=4", "num_generations=1", "sampling.max_tokens=4")
ELSEWHERE = r"es-cookbook math|python -m es_cookbook\.plugins\.gradients\.sft"
"""Lines of the page of tasks that need the Hub, or that tests/plugins/gradients runs."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, with a model beside it that reads and writes any text."""
    tokenizer = tokenizer_with(CHATML)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    config = Qwen2Config(vocab_size=len(tokenizer), **shape, **heads)
    save_with_tokenizer(Qwen2ForCausalLM(config), tmp_path / "model", tokenizer)
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return folder


@pytest.mark.slow
def test_the_guide_runs_as_it_is_written(here: Path) -> None:
    said = ""
    for block in blocks_of(GUIDE):
        if block.kind == "python":
            write(block)
        elif block.kind == "text":
            printed = {beginning(line) for line in said.splitlines()}
            shown = {beginning(line) for line in block.text.splitlines() if line != "…"}
            assert shown - printed == set(), block
        else:
            said = "".join(run(line) for line in command_lines(block))
    rows = (here / "people.jsonl").read_text().splitlines()
    assert len(rows) == len({*rows}) == 300


def blocks_of(page: str) -> Iterator[Block]:
    return (block for block in BLOCKS if block.page == page)


def write(block: Block) -> None:
    """Write a block to the file that its first line names."""
    name = block.text.partition("\n")[0].removeprefix("# ")
    Path(name).write_text(block.text)


def run(line: str, *options: str) -> str:
    """Run a line with a tiny model and less work, and return what it prints."""
    program, *words = shlex.split(line)
    if program == "python":
        runpy.run_path(words[0], run_name="__main__")
        return ""
    words = [re.sub(r"^model_name=.*", "model_name=../model", word) for word in words]
    words = [re.sub(r"^minutes=.*", "minutes=0.02", word) for word in words]
    done = typed(*words, *options)
    assert done.returncode == 0, (line, done.stderr)
    return done.stderr + done.stdout


def beginning(line: str) -> tuple[str, ...]:
    """Return the first two words of a line, with numbers replaced."""
    return tuple(re.sub(r"[\d.,]*\d", "#", line).split()[:2])


@pytest.mark.slow
def test_the_commands_of_custom_tasks_run_on_the_rows_of_the_page(here: Path) -> None:
    rows, function, *_ = python_of(TASKS)
    exec(rows.text, {})
    lines = (here / "rows.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 400
    (here / "rows.jsonl").write_text("".join(lines[:60]))
    (here / "my_rewards.py").write_text(function.text)
    typed_lines = [line for block in blocks_of(TASKS) for line in commands_in(block)]
    with chat_server(lambda _: "It is 980.") as server:
        for i, line in enumerate(typed_lines):
            asks = line.startswith("es-cookbook generate")
            options = [f"base_url={server.url}"] if asks else [*SHORT, f"log_path=runs/{i}"]
            assert run(line, *options)
    assert len(typed_lines) == 7


def python_of(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.kind == "python"]


def commands_in(block: Block) -> list[str]:
    """Return the commands of a block that can run here."""
    shown = command_lines(block) if block.kind in ("", "indented") else []
    return [line.strip() for line in shown if not re.match(ELSEWHERE, line)]


@pytest.mark.parametrize("name", ["TwoTriesData", "HintsData"])
def test_an_env_of_custom_tasks_trains(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, *blocks = python_of(TASKS)
    exec(rows.text, {})
    (block,) = [block for block in blocks if f"class {name}" in block.text]
    (here / f"page_{name}.py").write_text(block.text)
    monkeypatch.syspath_prepend(here)
    data: Any = getattr(importlib.import_module(f"page_{name}"), name)
    dataset: RLDatasetBuilder = data(
        source="rows.jsonl", problems_per_generation=2, num_train=8, num_test=2
    )
    result = run_config(
        Config(
            model_name="../model",
            dataset=dataset,
            optimizer=ES(population_size=4, sigma=0.01, learning_rate=0.01),
            sampling=SamplingParams(max_tokens=4),
            num_generations=1,
            log_path="run",
        )
    )
    assert "test/reward/mean" in result.last
