"""Tasksets written against the real library, played by a policy of ours."""

import json
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from es_cookbook.common.errors import ConfigError, DataError, EnvError
from es_cookbook.plugins.verifiers.dataset import TasksetProblems
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.messages.chat import ChatOptions
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Observation, Trajectory
from tests.chat_templates import CHATML, tokenizer_with

# One worker for all: importing the library takes seconds.
pytestmark = pytest.mark.xdist_group("verifiers")

TOKENIZER = tokenizer_with(CHATML)
BUY = '<tool_call>{"name": "shop_buy", "arguments": {"item": "%s"}}</tool_call>'


def problems(package: str, options: str = "{}", **fields: object) -> TasksetProblems:
    from es_cookbook.plugins.verifiers.library import find_taskset

    return TasksetProblems(
        taskset=find_taskset(package), options=options, problems_per_generation=1, **fields
    )  # type: ignore[arg-type]


async def loaded(package: str, options: str = "{}", **fields: object) -> ProblemDataset[Any]:
    dataset = (await problems(package, options, num_test=0, **fields)(TOKENIZER)).train
    assert isinstance(dataset, ProblemDataset)
    return dataset


async def played(
    dataset: ProblemDataset[Any], task: int, texts: Sequence[str], context_length: int = 4000
) -> tuple[Trajectory, Script]:
    builder = pickle.loads(pickle.dumps(dataset.builders[task]))
    group = await builder.make_envs(1)
    script = Script(texts, TOKENIZER, context_length)
    try:
        return await run_rollout(group.envs[0], script), script
    finally:
        await group.close()


def last_metrics(trajectory: Trajectory) -> dict[str, float]:
    return dict(trajectory.transitions[-1].metrics)


async def test_a_task_of_one_turn_is_asked_and_scored() -> None:
    dataset = await loaded("es_sums")
    await dataset.validate(100)
    trajectory, script = await played(dataset, 2, ["8"])
    prompt = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+6=<|im_end|>\n"
    assert TOKENIZER.decode(script.seen[0].tokens_T) == f"{prompt}<|im_start|>assistant\n"
    (turn,) = trajectory.transitions
    metrics = last_metrics(trajectory)
    assert trajectory.reward == 2.0 + 1 / (1 + len(turn.action.tokens_T))
    assert metrics["reward_correct"] == 1.0 and metrics["characters"] == 1.0
    assert metrics["turns"] == 1.0 and metrics["turn_limit"] == metrics["context_limit"] == 0.0
    wrong, _ = await played(dataset, 2, ["9 or so"])
    assert last_metrics(wrong)["reward_correct"] == 0.0 and last_metrics(wrong)["characters"] == 7.0


@pytest.mark.parametrize(
    ("opening", "text", "correct"),
    [
        ("", "<think>2+6 is</think>\n\n8", 1.0),
        ("", "<think>8", 0.0),
        ("<think>\n", "8", 0.0),
        ("<think>\n</think>\n", "8", 1.0),
    ],
)
async def test_what_is_thought_is_not_scored(
    monkeypatch: pytest.MonkeyPatch, opening: str, text: str, correct: float
) -> None:
    start = "<|im_start|>assistant\n"
    before, _, after = CHATML.rpartition(start.removeprefix("<|im_start|>"))
    opened = tokenizer_with(f"{before}assistant\n{opening}{after}")
    monkeypatch.setattr(sys.modules[__name__], "TOKENIZER", opened)
    dataset = await loaded("es_sums", chat=ChatOptions())
    trajectory, script = await played(dataset, 2, [text])
    assert str(opened.decode(script.seen[0].tokens_T)).endswith(start + opening)
    assert last_metrics(trajectory)["reward_correct"] == correct


async def test_an_environment_answers_turn_by_turn_and_tokens_stay_as_they_were_sampled() -> None:
    trajectory, script = await played(await loaded("es_guess"), 3, ["9", "2", "4"])
    asked = [str(TOKENIZER.decode(seen.tokens_T)) for seen in script.seen]
    assert asked[1].endswith(
        "9<|im_end|>\n<|im_start|>user\nless<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "user\nmore" in asked[2]
    kinds = [kind for kind, _ in trajectory.seen]
    assert kinds == ["prompt", "added", "added"]
    metrics = last_metrics(trajectory)
    assert metrics["found"] == 1.0 and metrics["turns"] == 3.0
    # One for the number, a tenth a turn, and what `finalize` adds for six messages.
    assert trajectory.reward == pytest.approx(1.0 - 0.3 + 0.06)
    assert trajectory.transitions[-1].logs["stop"] == "user_closed"


async def test_stop_conditions_and_limits_end_a_rollout_that_is_scored_as_far_as_it_came() -> None:
    dataset = await loaded("es_guess", chat=ChatOptions(max_turns=2))
    shouted, _ = await played(dataset, 3, ["3!"])
    assert shouted.transitions[-1].logs["stop"] == "shouted"
    assert last_metrics(shouted)["reward_near"] == 0.5
    long, _ = await played(dataset, 3, ["2", "3"])
    assert last_metrics(long)["turn_limit"] == 1.0 and last_metrics(long)["reward_near"] == 0.5
    length = len(TOKENIZER.encode("<|im_start|>user\n1 to 9?")) + 12
    cut, script = await played(dataset, 3, ["2"], context_length=length)
    assert len(script.seen) == 1
    assert last_metrics(cut)["context_limit"] == 1.0
    assert last_metrics(cut)["reward_near"] == pytest.approx(1 / 3)


async def test_tools_are_called_with_the_state_of_their_rollout() -> None:
    dataset = await loaded("es_shop")
    prompt = str(TOKENIZER.decode((await _first(dataset)).tokens_T))
    assert '"name": "shop_buy"' in prompt and "Buy one thing." in prompt
    both = BUY % "tea" + BUY % "cake"
    results: dict[int, tuple[Trajectory, Script]] = {}

    async def play(task: int, texts: Sequence[str]) -> None:
        results[task] = await played(dataset, task, texts)

    async with anyio.create_task_group() as rollouts:  # At once: their baskets are apart.
        rollouts.start_soon(play, 0, [both, "done"])
        rollouts.start_soon(play, 1, [BUY % "tea", "done"])
    trajectory, script = results[0]
    assert trajectory.reward == 5.0 and results[1][0].reward == 2.0
    said = str(TOKENIZER.decode(script.seen[1].tokens_T))
    assert "3 left" in said and "0 left" in said
    metrics = last_metrics(trajectory)
    assert metrics["tool_calls"] == 2.0 and metrics["tool_errors"] == 0.0


async def test_what_goes_wrong_with_a_call_is_told_to_the_model_and_counted() -> None:
    calls = [
        '<tool_call>{"name": "price", "arguments": {"item": "gold"}}</tool_call>',
        '<tool_call>{"name": "shop_buy", "arguments": {"thing": 1}}</tool_call>',
        '<tool_call>{"name": "sell", "arguments": {}}</tool_call>',
        "<tool_call>price(tea)</tool_call>",
        '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>',
        "done",
    ]
    trajectory, script = await played(await loaded("es_shop"), 0, calls)
    said = [str(TOKENIZER.decode(seen.tokens_T)) for seen in script.seen]
    assert "Error executing tool price" in said[1]
    assert "Error executing tool buy" in said[2] and "item" in said[2]
    assert "error: unknown tool 'sell'" in said[3]
    assert "error: a tool call is not JSON" in said[4]
    assert said[5].count("\n2<|im_end|>") + said[5].count("\n2\n") == 1
    metrics = last_metrics(trajectory)
    assert metrics["tool_calls"] == 4.0 and metrics["tool_errors"] == 3.0
    assert metrics["malformed_calls"] == 1.0


async def test_held_out_tasks_are_the_same_for_every_seed_and_not_trained_on() -> None:
    first = await problems("es_sums", num_test=5)(TOKENIZER)
    again = await problems("es_sums", num_test=5, seed=7)(TOKENIZER)
    names = [getattr(builder, "name", "") for builder in first.test_P]
    assert names == [getattr(builder, "name", "") for builder in again.test_P] and names
    assert isinstance(first.train, ProblemDataset)
    held_out = {getattr(builder, "content", "") for builder in first.test_P}
    assert not held_out & {builder.content for builder in first.train.builders}


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("raises", DataError, "failed to load: OSError: the server of the data is down"),
        ("picture", DataError, "its prompt has a part of the kind 'image_url', and only text"),
        ("no_prompt", DataError, "it has no prompt"),
        ("container", ConfigError, "it runs in a container"),
        ("skills", ConfigError, "it has skills"),
        ("runtime_reward", ConfigError, "its reward 'passes_tests' takes a runtime"),
        ("runtime_setup", ConfigError, "its method 'setup' takes a runtime"),
        ("server_tools", ConfigError, "its tools Remote are on a server"),
        ("intercepts", ConfigError, "its hook 'masked' (@vf.intercept)"),
    ],
)
async def test_what_cannot_be_played_is_refused_before_training_in_one_sentence(
    kind: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        await loaded("es_unplayable", json.dumps({"kind": kind}))
    assert says in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "nan_reward",
            "its taskset must give finite numbers as metrics, found float nan for 'reward_points'",
        ),
        ("raising_reward", "the taskset's code failed: TaskError"),
    ],
)
async def test_a_rollout_that_cannot_be_scored_is_lost_with_a_reason(kind: str, says: str) -> None:
    dataset = await loaded("es_unplayable", json.dumps({"kind": kind}))
    with pytest.raises(EnvError) as caught:
        await played(dataset, 1, ["anything"])
    assert str(caught.value).startswith("es_unplayable, task 1: ")
    assert says in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("options", ["{", "[]", '{"kind": "unknown"}', '{"colour": 1}'])
async def test_options_that_do_not_fit_the_taskset_are_refused(options: str) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.options do not fit the taskset es_unplayable"):
        await loaded("es_unplayable", options)


async def test_a_cancelled_rollout_ends_the_environment_with_it() -> None:
    dataset = await loaded("es_guess")
    group = await dataset.builders[0].make_envs(1)
    env = group.envs[0]
    env.policy = Script(["1"], TOKENIZER)
    await env.initial_observation()
    with anyio.fail_after(5):
        await group.close()
        await group.close()


async def _first(dataset: ProblemDataset[Any]) -> Observation:
    group = await dataset.builders[0].make_envs(1)
    try:
        group.envs[0].policy = Script([], TOKENIZER)
        return await group.envs[0].initial_observation()
    finally:
        await group.close()
