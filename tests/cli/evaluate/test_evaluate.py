"""The command measures what a run measures of itself, to the bit, and compares what can be."""

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import chz
import pytest
import torch

from es_cookbook.common.terminal import plural
from es_cookbook.plugins.vectors.spaces import SoftPrompt
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.rewards.matching import Exact
from es_cookbook.runs.program import train as train_run
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.fakes import FakeEngineBuilder
from tests.quantised_models import How, quantise
from tests.said import typed
from tests.tiny_run import TinyConfig, write_tiny_model


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and runs: on an engine that answers at once, and on a real one."""
    path = tmp_path_factory.mktemp("evaluate")
    model = str(write_tiny_model(path / "model"))
    with contextlib.chdir(path):
        run(TinyConfig(model_name=model, log_path="real", eval_every=1))
        fake = TinyConfig(model_name=model, log_path="fake", engine=FakeEngineBuilder())
        run(chz.replace(fake, eval_attempts=4, eval_temperature=1.0))
        run(chz.replace(fake, log_path="other", seed=1))
    return path


@pytest.fixture(autouse=True)
def inside(here: Path) -> Iterator[None]:
    with contextlib.chdir(here):
        yield


def run(config: TinyConfig) -> None:
    config = chz.replace(config, num_generations=3, trackers=JsonlTrackerBuilder())
    anyio.run(train_run, config)


def evaluate(*options: str) -> subprocess.CompletedProcess[str]:
    """The command, with the tests' Envs trusted."""
    return typed("evaluate", *options, "trust=tests")


MEANS = ("test/reward", "test/env", "test/pass@", "test/rollouts")


def measured(*options: str) -> dict[str, Any]:
    """What is in the file that the command writes."""
    output = Path("evaluation.json")
    output.unlink(missing_ok=True)
    done = evaluate(*options, f"output={output}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"written to {output}\n")
    return json.loads(output.read_text())


def recorded(log_path: str) -> list[dict[str, float]]:
    """The held-out means of a run, evaluation by evaluation; without their intervals."""
    rows = [json.loads(line) for line in Path(log_path, "metrics.jsonl").read_text().splitlines()]
    found = [
        {key.removeprefix("test/"): row[key] for key in row if key.startswith(MEANS)}
        for row in rows
    ]
    return [metrics for metrics in found if metrics]


def test_evaluation_equals_the_recorded_one_bit_for_bit() -> None:
    for_generation = recorded("real")
    assert len({json.dumps(metrics) for metrics in for_generation}) > 1, "something to mistake"
    for generation in (0, 2):
        found = measured("log_path=real", f"generation={generation}")
        assert found["metrics"] == for_generation[generation]
        assert found["generation"] == generation
    assert measured("log_path=real")["metrics"] == for_generation[3]


def test_evaluation_with_several_attempts_equals_the_recorded_one() -> None:
    found = measured("log_path=fake")
    assert found["metrics"] == recorded("fake")[-1]
    assert "pass@4" in found["metrics"]
    done = evaluate("log_path=fake")
    assert "4 held-out problems, 4 attempts at each, temperature 1" in done.stdout
    assert "pass@4 " in done.stdout and "bootstrap" in done.stdout


def test_answers_are_printed_before_and_after_to_read() -> None:
    said = evaluate("log_path=fake", "against=base", "answers=2").stdout.split("\nAnswers:\n\n")[1]
    first, second = said.removesuffix("\n").split("\n\n")
    for number, block in ((50, first), (51, second)):
        title, before, after = block.split("\n")
        assert title == f"test {number}"
        assert re.fullmatch(r"  base: .+  \(reward [\d.]+\)", before)
        assert re.fullmatch(r"  generation 3: .+  \(reward [\d.]+\)", after)


def test_the_file_has_every_problem_and_says_what_was_measured_and_how() -> None:
    found = measured("log_path=fake", "attempts=2", "temperature=0.5", "seed=7", "against=base")
    assert [problem["name"] for problem in found["problems"]] == [
        f"test {number}" for number in range(50, 54)
    ]
    first = found["problems"][0]
    assert first["tags"] == ["even"] and len(first["reward"]) == 2
    assert set(first["metrics"]) == {"correct", "format"}
    assert found["settings"] == {
        "problems": "the run's own",
        "split": "test",
        "attempts": 2,
        "temperature": 0.5,
        "sampling.max_tokens": 4,
        "sampling.top_p": 1.0,
        "seed": 7,
        "rollout_timeout": 600.0,
        "turn_timeout": None,
        "dataset": {"$format": 1, "$class": "tests.fakes:SmallDatasetBuilder"},
    }
    last = json.loads(Path("fake/history.jsonl").read_text().splitlines()[-1])
    assert int(found["model"]["fingerprint"], 16) == int(last["fingerprint"], 16)
    assert found["against"]["model"]["fingerprint"] is None
    assert found["against"]["generation"] == 0
    assert [c["metric"] for c in found["comparisons"]] == ["reward", "correct", "format"]


def test_another_run_and_a_model_are_compared_on_the_same_problems() -> None:
    done = evaluate("log_path=fake", "against=other@2")
    assert "Against other after 2 generations" in done.stdout and "sign test)" in done.stdout
    assert "Against model, problem by problem:" in evaluate("log_path=fake", "against=model").stdout


def test_the_base_is_a_model_where_a_run_starts_elsewhere_and_models_may_be_quantised() -> None:
    space = SoftPrompt(num_tokens=2)
    run(TinyConfig(model_name="model", log_path="soft", search_space=space, eval_every=1))
    quantise(Path("model"), Path("codes"), Path("numbers"), How(dtype=torch.float32))
    found = [measured("log_path=soft", f"against={each}") for each in ("base", "codes", "numbers")]
    of_base, of_codes, of_numbers = (each["against"]["metrics"] for each in found)
    assert of_base == recorded("real")[0] != recorded("soft")[0] and of_codes == of_numbers
    assert "before its first generation\n" in evaluate("log_path=soft", "generation=0").stdout


def test_a_model_is_measured_on_a_recipe_and_a_run_on_another_recipe() -> None:
    options = ("recipe=countdown", "dataset.num_test=5", "dataset.num_train=40")
    found = measured("model_name=model", *options, "sampling.max_tokens=2")
    assert found["generation"] is None and len(found["problems"]) == 5
    assert found["settings"]["sampling.max_tokens"] == 2
    done = evaluate("log_path=real", *options)
    assert done.returncode == 0, done.stderr
    assert "5 held-out problems of countdown" in done.stdout and "at most 32 tokens" in done.stdout


def test_a_model_is_measured_on_fewer_rows_than_a_batch_has(here: Path) -> None:
    rows = [json.dumps({"question": f"{i}", "answer": f"{i}"}) for i in range(3)]
    (here / "three.jsonl").write_text("\n".join(rows))
    given = ("data=three.jsonl", "prompt={question}", "reward=exact", "split=train")
    found = measured("model_name=model", *given, "sampling.max_tokens=2", "dataset.num_test=1")
    assert len(found["problems"]) == 2


@pytest.fixture(scope="module")
def rows_run(here: Path) -> str:
    """A run on sixty rows, of which twelve are held out."""
    with contextlib.chdir(here):
        rows = [json.dumps({"question": f"{i}", "answer": f"{i}a", "n": i}) for i in range(60)]
        Path("sixty.jsonl").write_text("\n".join(rows))
        task = Task(
            source="sixty.jsonl",
            reward=Exact(),
            num_test=12,
            problems_per_generation=2,
            num_train=48,
        )
        fake = TinyConfig(model_name="model", log_path="of_rows", engine=FakeEngineBuilder())
        run(chz.replace(fake, dataset=task))
    return "of_rows"


@pytest.mark.parametrize(
    ("options", "problems", "shared"),
    [
        (["prompt={question} 1"], 12, 0),
        (["dataset.split_by=question"], 12, 11),
        (["recipe=countdown", "dataset.num_test=3", "dataset.num_train=40"], 3, 0),
    ],
)
def test_problems_that_the_run_trains_on_are_counted(
    rows_run: str, options: list[str], problems: int, shared: int
) -> None:
    found = measured(f"log_path={rows_run}", *options, "against=base")
    assert (len(found["problems"]), found["trained_on"]) == (problems, shared)
    assert found["against"]["trained_on"] == 0
    said = f"Not held out: {rows_run} trains on {shared} of {plural(problems, 'problem')}.\n"
    assert (said in evaluate(f"log_path={rows_run}", *options).stdout) == bool(shared)


def test_without_a_record_the_count_of_trained_problems_is_unknown(rows_run: str) -> None:
    shutil.copytree(rows_run, "old")
    Path("old", "trained_on.bin").unlink()
    done = evaluate("log_path=old", f"against={rows_run}")
    assert "Which of these problems old trains on is not known.\n" in done.stdout
    assert f"Not held out: {rows_run}" not in done.stdout


def test_training_problems_are_measured_where_there_is_a_list_of_them() -> None:
    options = ("recipe=countdown", "dataset.num_train=40", "sampling.max_tokens=2")
    found = measured("model_name=model", *options, "split=train")
    assert len({problem["name"] for problem in found["problems"]}) == 40
    done = evaluate("log_path=fake", "split=train")
    assert "a SmallDataset chooses its problems batch by batch" in done.stderr


def test_lost_rollouts_are_counted_and_named() -> None:
    Path("marks.py").write_text(
        "def score(text, row):\n"
        "    if int(row['answer']) % 10 == 0:\n"
        "        raise ValueError('no \\x1b[2J mark')\n"
        "    return 0.5\n"
    )
    rows = [json.dumps({"question": f"{i}", "answer": str(i)}) for i in range(300)]
    Path("many.jsonl").write_text("\n".join(rows))
    options = ("data=many.jsonl", "reward=marks.py:score", "dataset.full_reward=None")
    refused = evaluate("model_name=model", *options, "max_failed_fraction=0")
    assert refused.returncode == 1 and "more than max_failed_fraction=0 allows" in refused.stderr
    done = evaluate("model_name=model", *options, "max_failed_fraction=1")
    (lost,) = re.findall(r"^lost: (\d+) of (\d+) rollouts, left out above$", done.stdout, re.M)
    assert 0 < int(lost[0]) < int(lost[1])
    assert r"no \x1b[2J mark" in " ".join(done.stdout.split()), done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["log_path=fake", "generation=9"], "there is no generation 9: the run has recorded 3"),
        (["log_path=fake", "against=@3"], "against=@3 is what is evaluated itself"),
        (["log_path=model"], "a model is evaluated by model_name=model recipe=..."),
        (["log_path=fake", "recipe=countdwn"], "unknown recipe 'countdwn': did you mean 'countd"),
        (["model_name=model"], "recipe=... says which problems are attempted ("),
        (["log_path=fake", "attempts=4", "temperature=0"], "attempts=4 would all be alike, since"),
        (["log_path=fake", "sampling.temperature=1"], "sampling.temperature is temperature=..."),
        (["log_path=fake", "optimizer.sigma=1"], "of the options of a run an evaluation"),
        (["log_path=fake", "output=a.txt"], "output must be a .json file, found 'a.txt'"),
        (["log_path=fake", "metric=corect"], "metric must be one that the Envs report"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_loaded(options: list[str], sentence: str) -> None:
    is_late = any("metric" in option for option in options)
    done = evaluate(*options, *([] if is_late else ["engine=tests.fakes:NoEngineBuilder"]))
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode in (1, 2) and sentence in last
    assert bool(done.stdout) == is_late, "what was measured is shown all the same"
