"""Policy gradients on real engines and Envs: what is learned from, that it learns, and runs."""

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import chz
import pytest
import torch

from es_cookbook import FullRank, Observation, PopulationSampler, SamplingParams, TorchEngineBuilder
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.common.errors import ConfigError, DataError, RunDirectoryError
from es_cookbook.evolution.schedules import Table
from es_cookbook.plugins.gradients.gradient_run import Gradients
from es_cookbook.plugins.gradients.learner import Learner, learned_places
from es_cookbook.plugins.gradients.policy_gradient import (
    PPO,
    Batch,
    Config,
    Expert,
    Gold,
    Group,
    Method,
    Weighted,
    learn,
    learner_of,
    main,
    to_examples,
)
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.objectives import PassAtK
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rollouts import Example, sequences_of
from es_cookbook.rl.surrogate import GoldAnswers
from es_cookbook.rl.types import (
    Action,
    LostRollout,
    Reading,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from es_cookbook.runs.directory.directory import read_trained_on
from es_cookbook.runs.program import train
from es_cookbook.runs.setup import opened
from es_cookbook.runs.tracking.curves import points
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from es_cookbook.runs.tracking.reading import read_run
from tests.fakes import FakeEngine, problem
from tests.grpo_runs import (
    EchoGroup,
    check_resumed_as_if_never_stopped,
    gradient_config,
    metrics_of,
)
from tests.programs import ROOT
from tests.said import told, typed
from tests.tiny_run import TinyConfig, write_tiny_model


def config(model: Path, log_path: Path, **changes: object) -> Config:
    return gradient_config(Config, model, log_path, **changes)


def turn(prompt: Sequence[int], action: Sequence[int], reward: float = 0.0) -> Transition:
    logprobs_T = tuple(-0.5 * token for token in action)
    return Transition(
        Observation(tuple(prompt)), Action(tuple(action), "", "stop", logprobs_T), reward, {}, {}
    )


# --- what is learned from ------------------------------------------------------------------------


def test_a_group_is_the_baseline_of_its_answers() -> None:
    assert Group(normalise=False).weights([1.0, 2.0, 6.0], [0.0] * 3) == [-2.0, -1.0, 3.0]
    normalised = Group().weights([1.0, 2.0, 6.0], [0.0] * 3)
    assert normalised == pytest.approx([-0.9258, -0.4629, 1.3887], abs=1e-4)
    # Means of equal numbers are not always those numbers; a group without signal must have none.
    assert PPO().weights([0.1] * 3, [1.0] * 3) == [0.0] * 3
    assert Group().weights([], []) == Expert().weights([], []) == []


def test_expert_iteration_keeps_right_answers_or_the_best_of_a_group() -> None:
    assert Expert().weights([0.9, 0.1, 0.9], [1.0, 0.0, 0.5]) == [1.0, 0.0, 0.0]
    assert Expert(keep="best").weights([0.9, 0.1, 0.9], [math.nan] * 3) == [1.0, 0.0, 1.0]
    assert Expert(keep="best").weights([0.9, 0.9], [1.0, 1.0]) == [0.0, 0.0]
    with pytest.raises(ConfigError, match=r"keep=right needs Envs that report .*'correct'"):
        Expert().weights([0.9, 0.1], [1.0, math.nan])


@pytest.mark.parametrize(
    ("weight", "ratio", "gain", "slope"),
    [
        (2.0, 1.1, 2.2, 2.2),
        (2.0, 1.5, 2.4, 0.0),  # far enough up
        (2.0, 0.5, 1.0, 1.0),  # the wrong way: still pulled back
        (-2.0, 0.5, -1.6, 0.0),  # far enough down
        (-2.0, 1.5, -3.0, -3.0),
    ],
)
def test_ppo_stops_where_a_ratio_has_moved_far_enough(
    weight: float, ratio: float, gain: float, slope: float
) -> None:
    sampled = torch.tensor([-3.0])
    now = (sampled + math.log(ratio)).requires_grad_()
    found = PPO(clip=0.2).objective(now, sampled, torch.tensor([weight]))
    found.sum().backward()
    assert found.tolist() == pytest.approx([gain])
    assert now.grad is not None and now.grad.tolist() == pytest.approx([slope])


def test_turns_of_a_chat_are_one_sequence_in_which_the_models_own_tokens_count() -> None:
    chat = Trajectory((turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])))
    (found,) = sequences_of(chat, 0.5)
    assert found.tokens_T == (1, 2, 3, 4, 5, 6)
    assert found.learned_T == (False, False, True, True, False, True)
    assert found.sampled_T == (0.0, 0.0, -1.5, -2.0, 0.0, -3.0)
    assert found.weight == 0.5
    rewritten = Trajectory((turn([1, 2], [3, 4]), turn([1, 4, 5], [6])))
    assert [each.tokens_T for each in sequences_of(rewritten, 1.0)] == [(1, 2, 3, 4), (1, 4, 5, 6)]
    (first, second) = chat.transitions
    forced = Action((3, 4), "", "stop")  # sampled differently
    own = Transition(first.observation, forced, 0.0, {}, {})
    (found,) = sequences_of(Trajectory((own, second)), 1.0)
    assert found.learned_T == (False, False, False, False, False, True)


def test_lost_rollouts_are_left_out_and_equal_ones_are_one() -> None:
    def rolled_out(action: int, reward: float) -> Trajectory:
        return Trajectory((turn([1], [action], reward),))

    lost = LostRollout("no", "")
    group = TrajectoryGroup(
        [[rolled_out(3, 1.0), lost, rolled_out(3, 1.0), rolled_out(4, 0.0), rolled_out(4, 0.0)]]
    )
    nothing = TrajectoryGroup([[lost, lost, rolled_out(3, 1.0), rolled_out(5, 1.0), lost]])
    examples, share = to_examples(Group(normalise=False), [group, nothing])
    assert share == 1 / 6, "of the rollouts that ended"
    assert {(each.tokens_T, each.weight, each.count) for each in examples} == {
        ((1, 3), 0.5, 2),
        ((1, 4), -0.5, 2),
    }


def test_with_pass_at_k_a_wrong_answer_costs_little_where_others_are_right() -> None:
    def rolled_out(action: int, right: float) -> Trajectory:
        said = turn([1], [action], reward=0.5)
        return Trajectory((dataclasses.replace(said, metrics={"fits": right}),))

    lost = LostRollout("no", "")
    one_of_four = [[rolled_out(3, 1.0), *[rolled_out(4, 0.2)] * 3, lost]]
    all_but_one = [[*[rolled_out(3, 1.0)] * 3, lost, rolled_out(4, 0.2)]]
    groups_P = [TrajectoryGroup(one_of_four), TrajectoryGroup(all_but_one)]
    at_2 = PassAtK(k=2, metric="fits", threshold=0.9)
    for method, scale in ((Group(), 1.0), (PPO(normalise=False), 0.5)):
        examples, share = to_examples(method, groups_P, at_2)
        assert share == 1 / 8
        weights = {each.tokens_T: (each.weight, each.count) for each in examples}
        assert weights == {
            (1, 3): (pytest.approx(scale), 1),
            (1, 4): (pytest.approx(-scale / 3), 3),
        }
    with pytest.raises(ConfigError, match=r"objective.metric must be one .*found 'correct'.*fits"):
        to_examples(Group(), groups_P, PassAtK(k=2))


# --- learning ------------------------------------------------------------------------------------


async def test_log_probabilities_of_the_learner_equal_those_of_the_engine(model: Path) -> None:
    builder = TorchEngineBuilder(device="cpu", num_lanes=1)
    engine = await builder(model_name=str(model), search_space=FullRank())
    sampling = SamplingParams(max_tokens=4, temperature=1.0, logprobs=True)
    try:
        sampler = PopulationSampler(engine, sampling=sampling)
        groups = await sampler.rollout_centre([EchoGroup((7, 8), 2)], sampling, 8, generation=3)
    finally:
        await engine.close()
    trajectories = cast(list[Trajectory], groups[0].trajectories_G_K[0])
    examples = [example for each in trajectories for example in sequences_of(each, 1.0)]
    assert len(examples) == 8 and {sum(each.learned_T) for each in examples} == {8}
    lm = load_causal_lm(str(model), "float32", torch.device("cpu"))
    learner = Learner(lm, ["model.norm.weight"], tokens_per_pass=64)
    for example, found_T in zip(examples, learner.logprobs(examples), strict=True):
        pairs = zip(example.sampled_T, example.learned_T, strict=True)
        assert found_T == pytest.approx([logprob for logprob, own in pairs if own], abs=1e-4)


async def test_rows_without_a_token_are_no_part_of_what_is_learned(tmp_path: Path) -> None:
    """Nor are they sampled: PPO's ratio would begin far from 1."""
    padded = write_tiny_model(tmp_path / "model", vocab_size=140)
    (tmp_path / "run").mkdir()
    of_run = config(padded, tmp_path / "run", eval_every=0)
    async with opened(Gradients(of_run, partial(learner_of, of_run))) as run:
        assert run is not None
        (group,) = await run.rollout(0, run.dataset.get_batch(0)[:1])
        trajectory, *_ = group.trajectories_G_K[0]
        assert isinstance(trajectory, Trajectory)
        examples = sequences_of(trajectory, 1.0)
        (found_T,) = run.learner.logprobs(examples)
    (example,) = examples
    sampled_T = [example.sampled_T[t] for t in learned_places(example)]
    assert found_T == pytest.approx(sampled_T, abs=1e-4)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("method", "learning_rate"),
    [
        (Group(), 0.05),
        (PPO(epochs=4, steps=2), 0.03),
        (Expert(keep="best"), 0.05),
        (PassAtK(k=2, metric="reward", threshold=0.6), 0.05),
    ],
)
async def test_each_method_learns_what_earns_rewards(
    method: Group | Expert | PassAtK, learning_rate: float, model: Path, tmp_path: Path
) -> None:
    log_path = tmp_path / "run"
    how: dict[str, object] = {"objective" if isinstance(method, PassAtK) else "method": method}
    how |= {"learning_rate": learning_rate, "num_generations": 10}
    await main(config(model, log_path, **how, eval_every=0, checkpoint_every=0))
    rewards = [row["reward/mean"] for row in metrics_of(log_path)[:-1]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards


@pytest.mark.parametrize("method", [PPO(epochs=2, steps=3), Gold()])
def test_a_schedule_scales_the_rate_of_every_step(method: Method, tmp_path: Path) -> None:
    """Steps are of shares of the answers, epoch by epoch in another order."""
    answers = [Example((5, token), (False, True), count=2) for token in range(7)]
    steps: list[tuple[Sequence[Example], float, float]] = []

    class Stepping:
        def step(self, part: Sequence[Example], _: object, rate: float, share: float) -> object:
            steps.append((part, rate, share))
            return 0.0, float(len(part))

    falls = Table(generations=(0, 4), factors=(1.0, 0.2))
    own = config(tmp_path, tmp_path, method=method, learning_rate_schedule=falls)
    measured = learn(own, 3, answers, 0.05, cast(Learner, Stepping()))
    sizes = [3, 2, 2] if method.steps == 3 else [7]
    assert [len(part) for part, *_ in steps] == sizes * method.epochs
    assert [rate for _, rate, _ in steps] == pytest.approx([0.004] * len(steps))
    assert {share for *_, share in steps} == {0.05 * method.steps}
    dealt = [example for part, *_ in steps for example in part]
    epochs = [dealt[i : i + 7] for i in range(0, len(dealt), 7)]
    assert all(sorted(epoch, key=str) == answers for epoch in epochs)
    assert len(set(map(tuple, [answers, *epochs]))) == 1 + method.epochs, "in different orders"
    assert measured == {
        "policy/weighted": pytest.approx(0.7),
        "policy/gradient_norm": pytest.approx(7 / len(sizes)),
        "optimizer/learning_rate": pytest.approx(0.004),
    }


async def test_what_gold_answers_teach_is_what_genomes_score() -> None:
    tokenizer, problems_P = FakeEngine().tokenizer, [problem(4, "train"), problem(5, "train")]
    nothing = TrajectoryGroup([])
    examples, share = await Gold().examples(Batch(problems_P, [nothing] * 2, tokenizer))
    scored_P = [await GoldAnswers().problem(each, nothing, tokenizer) for each in problems_P]
    assert examples == [answer for scored in scored_P for answer in scored.answers]
    assert share == 1 / 2
    assert (await Gold().examples(Batch(problems_P[:1], [nothing], tokenizer)))[1] == 1.0
    nameless = dataclasses.replace(cast(ProblemGroupBuilder, problem(4, "train")), gold=None)
    with pytest.raises(
        DataError, match=r"^train 4: it has no gold answer, which method=gold learns"
    ):
        await Gold().examples(Batch([nameless], [nothing], tokenizer))


def test_missing_gold_answers_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    data, answers = tmp_path / "rows.jsonl", [{"answer": 2}] * 30
    rows = [{"question": "1 + 1 =", **answer} for answer in [*answers[:7], {}, *answers[8:]]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    options = f"data={data} log_path={tmp_path / 'run'} dataset.full_reward=0 dataset.num_test=0"
    model = f"model_name={ROOT / 'es_cookbook/recipes/arithmetic/model'}"
    words = ["policy_gradient", model, "engine=tests.fakes:NoEngineBuilder", *options.split()]
    words += ["reward=tests.runs.test_presets:zero", "learning_rate=0.01"]
    words += ["dataset.problems_per_generation=1"]
    said = typed(*words, "attempts=1", "method=gold").stderr.splitlines()[-1]
    assert said.startswith(f"{data}, line 8: it has no gold answer, which method=gold learns from")
    with pytest.raises(AssertionError, match="a model was loaded"):
        typed(*words, "attempts=2")


# --- a run ---------------------------------------------------------------------------------------


async def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(
    model: Path, tmp_path: Path
) -> None:
    whole = config(model, tmp_path, method=PPO())
    resumed = await check_resumed_as_if_never_stopped(main, whole, tmp_path)
    assert [p.name for p in (tmp_path / "whole" / "checkpoints").iterdir()] == ["4"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        await main(resumed)
    assert "is complete, with 4 generations" in out.getvalue()
    with pytest.raises(RunDirectoryError, match=r"learning_rate was 0\.01, is 0\.02"):
        await main(chz.replace(resumed, learning_rate=0.02))


def test_other_tools_read_the_run_directory(model: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "run"
    anyio.run(main, config(model, log_path, eval_attempts=2, eval_temperature=1.0))
    measured = metrics_of(log_path)
    assert [("test/reward/mean" in row) for row in measured] == [True, False, True, False, True]
    assert measured[-1]["progress/rollouts"] == 4 * 2 * 16
    assert list(points(read_run(log_path), "test/env/all/correct", "rollouts")) == [0, 64, 128]
    for options, row in (([], measured[-1]), (["generation=0"], measured[0])):
        output = tmp_path / f"{len(options)}.json"
        said = told("evaluate", "trust=tests", f"log_path={log_path}", f"output={output}", *options)
        assert "written to" in said
        found = json.loads(output.read_text())["metrics"]
        assert found.items() <= {k[5:]: v for k, v in row.items() if k.startswith("test/")}.items()
    refused = told("evaluate", "trust=tests", f"log_path={log_path}", "generation=3")
    assert "keeps only its last checkpoint" in refused


def test_a_run_records_what_it_trains_on(model: Path, tmp_path: Path) -> None:
    dataset = CountdownDatasetBuilder(num_train=4, num_test=2, problems_per_generation=2)
    anyio.run(main, config(model, tmp_path, dataset=dataset, attempts=2, num_generations=1))
    known, built = read_trained_on(tmp_path), anyio.run(dataset, FakeEngine().tokenizer)
    assert known is not None and len(known.digests) == 8, "a content and a prompt for each"
    assert known.overlap(problem.digests for problem in built.train.training_problems) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attempts": 1}, "attempts must be at least 2"),
        ({"sampling": SamplingParams(temperature=0.7)}, "must be 1, found 0.7 and 1.0"),
        ({"objective": PassAtK(), "method": Expert()}, "needs method=group or method=ppo, found E"),
        ({"objective": PassAtK(k=17)}, r"objective.k=17 needs attempts=17 or more at each problem"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, tmp_path, **changes)


async def test_a_directory_of_another_kind_of_run_is_refused(model: Path, tmp_path: Path) -> None:
    fields = {"model_name": str(model), "num_generations": 1, "trackers": JsonlTrackerBuilder()}
    es = TinyConfig(**fields, log_path=str(tmp_path / "es"))  # pyright: ignore[reportArgumentType]
    await train(es)
    resumed = {"behavior_if_log_dir_exists": "resume", "num_generations": 1}
    with pytest.raises(RunDirectoryError, match="holds a run of evolution strategies"):
        await main(config(model, tmp_path / "es", **resumed))
    own = config(model, tmp_path / "own", **resumed)
    await main(own)
    with pytest.raises(RunDirectoryError, match="holds a run with another Config"):
        await train(chz.replace(es, log_path=own.log_path, behavior_if_log_dir_exists="resume"))
    (tmp_path / "own" / "checkpoints" / "1" / "state.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="is not a complete checkpoint"):
        await main(own)
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(ConfigError, match="is quantised, and gradients move plain weights"):
        await main(config(tmp_path, tmp_path / "new"))


PROMPT, ANSWER = (4, 5), (7, 8, 9)


def thought(token: int, reward: float, correct: float = 1.0) -> Trajectory:
    """One token about a prompt, and an answer of three behind it."""
    read = Reading((6, token), ANSWER, (-1.0, -2.0, -3.0))
    observation, action = Observation(PROMPT), Action((token,), "", "stop", (-0.5,))
    metrics = {"correct": correct}
    return Trajectory((Transition(observation, action, reward, metrics, {}, read),))


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (Group(), {3: 1 / 3, 4: 1 / 3}),
        (Group(reading=0.0), {}),
        (PPO(reading=0.3), {3: 0.1, 4: 0.1}),
        (Expert(), {3: 1 / 3}),
        (Expert(keep="best"), {3: 1 / 3}),
    ],
)
def test_methods_weigh_texts_that_are_read(method: Weighted, weights: dict[int, float]) -> None:
    group = TrajectoryGroup([[thought(3, 1.0), thought(4, 0.0, correct=0.0)]])
    examples, _ = to_examples(method, [group])
    found = {each.tokens_T[1]: each.weight for each in examples if each.is_read}
    assert found == pytest.approx(weights)
    assert any(not each.is_read for each in examples), "and what was sampled"


def test_a_group_of_equal_rewards_still_learns_to_read() -> None:
    group = TrajectoryGroup([[thought(3, 1.0), thought(3, 1.0)]])
    (example,), share = to_examples(Group(), [group])
    assert (example.is_read, example.count, share) == (True, 2, 0.5)


def test_both_parts_are_the_gradient_of_the_expected_reward(tmp_path: Path) -> None:
    """Against autograd: reward times log-probability of the thought, and the reward itself."""
    path = write_tiny_model(tmp_path / "model")
    model = load_causal_lm(str(path), "float32", torch.device("cpu"))
    learner = Learner(model, dict(model.named_parameters()), tokens_per_pass=1000)
    thoughts = (3, 4, 4, 10)

    def logprobs(prompt: tuple[int, ...], text: tuple[int, ...]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([prompt + text])).logits[0].float()
        told = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
        return told.gather(1, torch.tensor(text)[:, None])[:, 0]

    rewards = [logprobs((6, token), ANSWER).mean() for token in thoughts]
    baseline = math.fsum(reward.item() for reward in rewards) / len(rewards)
    wanted = torch.stack(
        [
            (reward.detach() - baseline) * logprobs(PROMPT, (token,)).sum() + reward
            for token, reward in zip(thoughts, rewards, strict=True)
        ]
    ).mean()
    gradients = torch.autograd.grad(wanted, list(learner.weights.values()))
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))

    trajectories = [thought(t, r.item()) for t, r in zip(thoughts, rewards, strict=True)]
    method = Group(normalise=False)
    examples, share = to_examples(method, [TrajectoryGroup([trajectories])])
    _, found = learner.step(examples, method.objective, 1e-3, share)
    assert found == pytest.approx(norm, rel=1e-4)
    without, share = to_examples(
        Group(normalise=False, reading=0.0), [TrajectoryGroup([trajectories])]
    )
    assert learner.step(without, method.objective, 1e-3, share)[1] < 0.9 * norm
