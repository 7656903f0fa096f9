"""Two answers to each problem on a real engine: what is asked, graded, measured and refused."""

import contextlib
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.common.errors import ConfigError
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.plugins.generate.reconsider import (
    Pass,
    buckets_of,
    first_of_one_turn,
    second_prompt,
    thought_before,
    write,
)
from es_cookbook.plugins.gradients import policy_gradient
from es_cookbook.population.results import results_of
from es_cookbook.rl.problem_env import TrainedOn
from es_cookbook.rl.types import (
    Action,
    LostRollout,
    Observation,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.chat_templates import CHATML, tokenizer_with
from tests.fakes import Pieces, SmallDatasetBuilder, problem
from tests.said import typed
from tests.tiny_run import TinyConfig, write_tiny_model

CUE = "ab"
"""Tokens 65 and 66."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, a run of evolution strategies and one of gradients."""
    path = tmp_path_factory.mktemp("reconsider")
    model = str(write_tiny_model(path / "model"))
    same = {
        "model_name": model,
        "engine": TorchEngineBuilder(device="cpu", num_lanes=1),
        "num_generations": 2,
        "eval_every": 0,
        "trackers": JsonlTrackerBuilder(),
    }
    with contextlib.chdir(path):
        anyio.run(train, TinyConfig(log_path="run", **same))
        gradient = policy_gradient.Config(
            log_path="gradient",
            dataset=SmallDatasetBuilder(),
            sampling=SamplingParams(max_tokens=4, temperature=1.0),
            attempts=4,
            learning_rate=0.05,
            **same,
        )
        anyio.run(policy_gradient.main, gradient)
    return path


@pytest.fixture(autouse=True)
def inside(here: Path) -> Iterator[None]:
    with contextlib.chdir(here):
        yield


def command(*options: str) -> subprocess.CompletedProcess[str]:
    """With the tests' Envs trusted."""
    return typed(*options, "trust=tests")


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]


# --- both passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("log_path", ["run", "gradient"])
def test_the_second_answer_follows_the_first_and_is_graded_alone(
    log_path: str, tmp_path: Path
) -> None:
    output, evaluation = tmp_path / "out", tmp_path / "evaluation.json"
    done = command("reconsider", f"log_path={log_path}", f"cue={CUE}", f"output={output}")
    assert done.returncode == 0, done.stderr
    assert command("evaluate", f"log_path={log_path}", f"output={evaluation}").returncode == 0
    problems = json.loads(evaluation.read_text())["problems"]
    weights = Path(log_path, "checkpoints/2/model")
    if log_path == "run":
        weights = tmp_path / "model"
        export(ExportConfig(log_path=log_path, output=str(weights), trust=("tests",)))
    model = load_causal_lm(str(weights), "float32", torch.device("cpu"))
    found = lines(output)
    assert len(found) == len(problems) == 4
    for row, evaluated in zip(found, problems, strict=True):
        first, second = row["first"], row["second"]
        assert (row["problem"], first["reward"]) == (evaluated["name"], *evaluated["reward"])
        assert second["prompt"] == first["prompt"] + first["text"] + CUE
        assert second["prompt_tokens"][-2:] == [65, 66]
        grade = Pieces(Observation((1,))).grade(second["text"])
        assert (second["reward"], second["metrics"]) == (grade.reward, grade.metrics)
        prompt_T, tokens_T = first["prompt_tokens"], first["tokens"]
        logits = model(input_ids=torch.tensor([prompt_T + tokens_T])).logits[0]
        chances = logits[len(prompt_T) - 1 :].double().softmax(dim=-1)
        literal = -(chances * chances.log()).sum(dim=-1)[:-1]
        assert row["entropies"] == pytest.approx(literal.tolist(), abs=1e-3)
        assert row["mean_entropy"] == pytest.approx(sum(row["entropies"]) / len(row["entropies"]))
        assert row["max_entropy"] == max(row["entropies"])
    assert {path.name for path in output.iterdir()} == {
        *("rollouts.jsonl", "entropy.png", "entropy.svg")
    }
    assert f"After the cue {CUE!r}:" in done.stdout
    compared = re.search(r"^correct +(\S+) %? +(\S+) %", done.stdout, flags=re.MULTILINE)
    assert compared is not None
    for which, share in zip(("second", "first"), compared.groups(), strict=True):
        assert float(share) == 25 * sum(row[which]["metrics"]["correct"] for row in found)


def test_in_a_chat_the_cue_is_a_users_turn() -> None:
    tokenizer = tokenizer_with(CHATML)
    user = [{"role": "user", "content": "hello"}]
    prompt_T = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False)
    said_T = tokenizer.encode("yes")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = Action((*said_T, end), "yes", "stop")
    after = second_prompt(tokenizer, "again")
    seen = after(turn(answer, Observation(tuple(prompt_T))))
    chat = [
        *user,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "again"},
    ]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(list(seen.tokens_T)) == whole
    plain = after(turn(answer, Observation(tuple(tokenizer.encode("hello")))))
    text = tokenizer.decode(list(plain.tokens_T))
    assert text.replace(" ", "") == "helloyesagain", "without the end of the answer"


@pytest.mark.parametrize(
    ("opening", "said", "cue", "thought"),
    [
        ("<think>\n", "5?</think>5", "again", "<think>"),  # As the next turn begins.
        ("<think>\n", "5?</think>5", "\n", ""),
        ("<think>\n", "It may be 5", "\n", "<think>"),
        ("", "5", "<think>", "<think>"),
        ("", "<think>5", "</think>", ""),
        ("", "5", "\n", ""),
    ],
)
def test_a_second_answer_may_stand_in_a_thought(
    opening: str, said: str, cue: str, thought: str
) -> None:
    tokenizer = tokenizer_with(CHATML + opening)
    said_T = tuple(tokenizer.encode(said, add_special_tokens=False))
    ask = f"<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n{opening}"
    prompt_T = tuple(tokenizer.encode(ask, add_special_tokens=False))
    first = turn(Action(said_T, said, "stop"), Observation(prompt_T))
    second = second_prompt(tokenizer, cue, chat=cue == "again")(first)
    assert thought_before(tokenizer, first, second, cue) == thought


def turn(answer: Action, seen: Observation | None = None, value: float = 0.0) -> Transition:
    return Transition(seen or Observation((65,)), answer, value, {"correct": value}, {})


# --- buckets -------------------------------------------------------------------------------------


HOSTILE = "\x1b[31m<script>alert(1)</script>\u2028\n\ud800"


def answers(values: list[float | None]) -> Pass:
    """An answer to each problem, with these values of `correct`; None for a lost one."""
    turns = [None if v is None else turn(Action((66,), HOSTILE, "stop"), value=v) for v in values]
    lost = LostRollout("Gone: away", "")
    groups = [TrajectoryGroup([[Trajectory((each,)) if each else lost]]) for each in turns]
    return Pass(turns, results_of([problem(i, "test") for i in range(len(values))], groups))


@pytest.mark.parametrize(
    ("entropies", "count", "buckets"),
    [
        ([3.0, 1.0, 2.0, 4.0, 5.0, 6.0], 3, [[1, 2], [0, 3], [4, 5]]),
        ([0.0, 0.0, 0.0, 1.0, 2.0], 4, [[0, 1, 2], [3], [4]]),
        ([1.0, math.nan, 1.0], 4, [[0, 2]]),
        ([math.nan], 2, []),
        ([], 2, []),
    ],
)
def test_buckets_are_quantiles_in_which_equal_values_stay_together(
    entropies: list[float], count: int, buckets: list[list[int]]
) -> None:
    same = answers([1.0] * len(entropies))
    found = buckets_of(same, same, entropies, "correct", count, seed=0)
    assert [each.problems for each in found] == buckets


def test_each_bucket_compares_both_answers_and_leaves_lost_ones_out(tmp_path: Path) -> None:
    first = answers([1.0, 0.0, 1.0, 1.0, None, 1.0])
    second = answers([1.0, 1.0, 0.0, 0.0, 1.0, None])
    entropies = [0.1, 0.2, 0.8, 0.9, math.nan, 0.5]
    sure, unsure = buckets_of(first, second, entropies, "correct", 2, seed=0)
    assert (sure.entropies, sure.problems) == ([0.1, 0.2], [0, 1])
    assert (sure.compared.second, sure.compared.first, sure.compared.better) == (0.5, 1.0, 1)
    assert (unsure.compared.second, unsure.compared.first, unsure.compared.worse) == (1.0, 0.0, 2)
    answered_P = [*((e,) for e in entropies[:4]), None, (0.5,)]
    write(tmp_path, first, second, tokenizer_with(CHATML), answered_P, [sure, unsure])
    rows = lines(tmp_path)
    assert [row["bucket"] for row in rows] == [0, 0, 1, 1, None, None]
    assert rows[0]["first"]["text"] == HOSTILE
    assert rows[4]["first"] == {"lost": "Gone: away"} and rows[4]["entropies"] is None


# --- what is refused -----------------------------------------------------------------------------


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for options, said in [
        (["log_path=run", "cue=é"], "the model's tokenizer knows '' of it"),
        (["log_path=run", "cue="], "cue must have at least one character"),
        (["log_path=run", f"cue={CUE}", f"output={tmp_path}/there"], "is there already"),
        (["log_path=run", f"cue={CUE}", "output=run/new"], "is in the run directory"),
        (["log_path=nowhere"], "nowhere"),
        (["log_path=run", f"cue={CUE * 14}"], "leaves no room for a second answer in 32 tokens"),
        (["log_path=run", f"cue={CUE}", "metric=corect"], "did you mean 'correct'"),
        (["log_path=run", "buckets=0"], "buckets must be"),
        (["log_path=run", "num_generations=3"], "has no effect"),
    ]:
        done = command("reconsider", *options)
        assert done.returncode != 0 and said in done.stderr, (options, done.stderr)


def test_several_turns_are_refused() -> None:
    several = Trajectory((turn(Action((2,), "x", "stop")),) * 2)
    with pytest.raises(ConfigError, match="a problem took 2 turns"):
        first_of_one_turn(TrajectoryGroup([[several]]))


def test_nothing_is_written_without_held_out_problems() -> None:
    done = command("reconsider", "recipe=countdown", r"cue=\n", "dataset.num_test=0")
    assert done.returncode == 1 and "there are no held-out problems" in done.stderr


def test_problems_that_a_run_trains_on_are_counted() -> None:
    shutil.copytree("gradient", "known", dirs_exist_ok=True)
    known = TrainedOn.of(problem(number, "test").digests for number in (50, 52, 7))
    assert known is not None
    Path("known/trained_on.bin").write_bytes(known.encode())
    said = "Not held out: known trains on 2 of 4 problems.\n"
    assert said in command("reconsider", "log_path=known").stdout
    for options in (["log_path=known", "generation=0"], ["log_path=gradient"]):
        assert "Not held out" not in command("reconsider", *options).stdout
