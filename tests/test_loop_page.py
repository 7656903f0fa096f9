"""The loop by hand, as its page has it, against a run with the same settings."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from es_cookbook import ES, Config, SamplingParams, Task, run
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.tiny_run import write_tiny_model

PAGE = (Path(__file__).parents[1] / "docs/loop.md").read_text(encoding="utf-8")
GENERATIONS = 3


def many_vowels(text: str, row: Mapping[str, object]) -> float:
    del row
    return sum(map(text.lower().count, "aeiou13579")) / 8


def test_the_loop_by_hand_is_what_a_run_does(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    module: dict[str, Any] = {}
    exec(code, module)
    module["score"] = many_vowels
    rows = [{"question": f"{i}+{i}=", "answer": "a" * 8} for i in range(60)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(write_tiny_model(tmp_path / "model"))
    by_hand = anyio.run(module["train"], model, str(source), GENERATIONS)
    result = run(
        Config(
            model_name=model,
            dataset=Task(source=str(source), prompt="{question}", reward=many_vowels, chat=False),
            optimizer=ES(population_size=16, sigma=0.01, learning_rate=0.02),
            sampling=SamplingParams(max_tokens=8),
            num_generations=GENERATIONS,
            log_path=str(tmp_path / "run"),
            trackers=JsonlTrackerBuilder(),
        )
    )
    measured = {name: value for name, value in result.last.items() if name.startswith("test/")}
    assert measured == {name: by_hand[name] for name in measured}
    assert result.first["test/reward/mean"] != result.last["test/reward/mean"] > 0
