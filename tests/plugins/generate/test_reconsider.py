"""Two answers to each problem on a real engine: what is asked, graded, measured and refused."""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch

from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.plugins.generate.reconsider import second_prompt
from es_cookbook.plugins.gradients import policy_gradient
from es_cookbook.rl.types import Action, Observation, SamplingParams, Transition
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.chat_templates import CHATML, tokenizer_with
from tests.fakes import Pieces, SmallDatasetBuilder
from tests.said import typed
from tests.tiny_run import TinyConfig, write_tiny_model

CUE = "ab"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, a run of evolution strategies and one of gradients."""
    path = tmp_path_factory.mktemp("reconsider")
    same = {
        "model_name": str(write_tiny_model(path / "model")),
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


def turn(answer: Action, seen: Observation | None = None) -> Transition:
    return Transition(seen or Observation((65,)), answer, 0.0, {}, {})


@pytest.mark.parametrize("log_path", ["run", "gradient"])
def test_a_second_answer_follows_the_first_and_counts_alone(log_path: str, tmp_path: Path) -> None:
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
    tokenizer = load_tokenizer("model")
    found = [json.loads(line) for line in (output / "rollouts.jsonl").read_text().splitlines()]
    assert len(found) == len(problems) == 4
    for row, evaluated in zip(found, problems, strict=True):
        first, second = row["first"], row["second"]
        assert (row["problem"], first["reward"]) == (evaluated["name"], *evaluated["reward"])
        assert second["prompt"] == first["prompt"] + first["text"] + CUE
        grade = Pieces(Observation((1,))).grade(second["text"])
        assert (second["reward"], second["metrics"]) == (grade.reward, grade.metrics)
        prompt_T, said_T = (
            tokenizer.encode(first[part], add_special_tokens=False) for part in ("prompt", "text")
        )
        logits = model(input_ids=torch.tensor([prompt_T + said_T])).logits[0]
        chances_T = logits[len(prompt_T) - 1 :].double().log_softmax(dim=-1)
        own = [-float(chances_T[t, token]) for t, token in enumerate(said_T)]
        end = row["uncertainty"] * (len(own) + 1) - sum(
            own
        )  # Of the last token, if that is the end.
        is_end = float((chances_T[-1] + end).abs().min()) < 1e-2
        assert is_end or row["uncertainty"] == pytest.approx(sum(own) / len(own), abs=1e-3)
    assert f"after the cue {CUE!r}:" in done.stdout and "by uncertainty" in done.stdout
    _, _, table = done.stdout.partition("Against the first answers")
    compared = re.search(r"^correct +(\S+) %? +(\S+) %", table, flags=re.MULTILINE)
    assert compared is not None
    for which, share in zip(("second", "first"), compared.groups(), strict=True):
        assert float(share) == 25 * sum(row[which]["metrics"]["correct"] for row in found)


def test_in_a_chat_the_cue_is_a_users_turn() -> None:
    tokenizer = tokenizer_with(CHATML)
    user = [{"role": "user", "content": "hello"}]
    prompt_T = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_dict=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = Action((*tokenizer.encode("yes"), end), "yes", "stop")
    after = second_prompt(tokenizer, "again")
    seen = after(turn(answer, Observation(tuple(prompt_T))))
    chat = [*user, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "again"}]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(list(seen.tokens_T)) == whole
    plain = after(turn(answer, Observation(tuple(tokenizer.encode("hello")))))
    text = tokenizer.decode(list(plain.tokens_T))
    assert text.replace(" ", "") == "helloyesagain", "without the end of the answer"


@pytest.mark.parametrize(
    ("opening", "said", "cue", "thought"),
    [
        ("<think>", "5?</think>5", "again", "<think>"),  # As the next turn begins.
        ("", "<think>5", "\n", "<think>"),
        ("", "<think>5", "</think>", ""),
        ("", "5", "\n", ""),
    ],
)
def test_a_second_answer_may_stand_in_a_thought(
    opening: str, said: str, cue: str, thought: str
) -> None:
    tokenizer = tokenizer_with(CHATML + opening)
    said_T = tuple(tokenizer.encode(said, add_special_tokens=False))
    ask = "<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n" if opening else "2 + 3?"
    prompt_T = tuple(tokenizer.encode(ask + opening, add_special_tokens=False))
    first = turn(Action(said_T, said, "stop"), Observation(prompt_T))
    assert second_prompt(tokenizer, cue)(first).opened == thought


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for options, said in [
        (["log_path=run", "cue=é"], "the model's tokenizer knows '' of it"),
        (["log_path=run", f"cue={CUE}", f"output={tmp_path}/there"], "is there already"),
        (["log_path=run", f"cue={CUE}", "output=run/new"], "is in the run directory"),
        (["log_path=run", f"cue={CUE * 14}"], "leaves no room in the engine's context"),
        (["log_path=run", f"cue={CUE}", "metric=corect"], "did you mean 'correct'"),
        (["log_path=run", "num_generations=3"], "of the options of a run an evaluation takes"),
    ]:
        done = command("reconsider", *options)
        assert done.returncode != 0 and said in done.stderr, (options, done.stderr)
