"""GRPO by TRL's trainer on real engines and Envs, with real steps."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import chz
import pytest
import torch
from safetensors.torch import load_file
from typing_extensions import override

from es_cookbook import EnvGroupBuilder, Observation, RLDatasetBuilder, SamplingParams, StepResult
from es_cookbook.common.errors import ConfigError, TooManyLostError
from es_cookbook.evolution.schedules import HotSteps, Table
from es_cookbook.plugins.gradients.checkpoints import latest_checkpoint
from es_cookbook.plugins.gradients.grpo import main
from es_cookbook.plugins.hub.background_push import HubPush
from es_cookbook.rl.types import Action, Datasets, EnvGroup, Tokenizer
from es_cookbook.runs.tracking.trackers import TrackersBuilder
from tests.fakes import Pieces, SmallDataset
from tests.grpo_runs import (
    Echoes,
    Listening,
    check_resumed_as_if_never_stopped,
    grpo_config,
    metrics_of,
    weights_of,
)
from tests.hub_server import HubServer
from tests.tiny_run import FILES_ALONE


@pytest.mark.daily
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "num_iterations": 2, "steps": 2},
        {
            **{"loss_type": "grpo", "beta": 0.01, "trained": "linear", "epsilon_high": 0.28},
            **{"products": "bfloat16", "temperature_schedule": HotSteps()},
        },
    ],
)
async def test_trl_learns_what_earns_rewards(
    how: dict[str, object], model: Path, tmp_path: Path
) -> None:
    ten = {"num_generations": 10, "learning_rate": 0.05, "eval_every": 0, "checkpoint_every": 0}
    await main(grpo_config(model, tmp_path, **{**ten, **how}))
    measured = metrics_of(tmp_path)[:-1]
    rewards = [row["reward/mean"] for row in measured]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert ("policy/kl" in measured[-1]) == ("beta" in how)
    steps = 4 if "steps" in how else 1
    assert len((tmp_path / "losses.csv").read_text().splitlines()) == 1 + 10 * steps


async def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(
    model: Path, tmp_path: Path
) -> None:
    whole = grpo_config(model, tmp_path, num_iterations=2, steps=2, beta=0.1)
    await check_resumed_as_if_never_stopped(main, whole, tmp_path)
    losses = (tmp_path / "copy" / "losses.csv").read_text()
    assert losses == (tmp_path / "whole" / "losses.csv").read_text()
    rows = [line.split(",") for line in losses.splitlines()[1:]]
    assert [row[0] for row in rows] == [str(step) for step in range(1, 17)]
    rates = [float(row[4]) for row in rows]
    scheduled = [0.01 * (1 - g / 4) for g in range(4) for _ in range(4)]
    assert rates == pytest.approx(scheduled)


async def test_a_checkpoint_is_the_model_as_it_was_but_for_its_weights(
    model: Path, tmp_path: Path
) -> None:
    await main(grpo_config(model, tmp_path, num_generations=1))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    for name in ("config.json", "generation_config.json"):
        assert (checkpoint.model / name).read_text() == (model / name).read_text(), name
    before, after = load_file(model / "model.safetensors"), weights_of(tmp_path)
    assert set(before) == set(after) and any((before[n] != after[n]).any() for n in before)


# --- several turns, other lengths, lost rollouts -------------------------------------------------


@pytest.mark.parametrize("turns", [1, 3])
async def test_turns_are_one_sequence(turns: int, model: Path, tmp_path: Path) -> None:
    how = {"dataset": Echoes(turns=turns), "eval_every": 0}
    await main(grpo_config(model, tmp_path, **how, num_generations=2))
    rows = metrics_of(tmp_path)
    assert rows[1]["progress/tokens"] == 2 * 2 * 16 * turns * 4


class Unreliable(Pieces):
    """Loses its rollouts from the third on, and those after it, as a grader that returns NaN."""

    number = 0

    @override
    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        wrong = math.nan if self.number % 2 else None
        return StepResult(wrong, True) if self.number > 1 else result  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Unreliables(EnvGroupBuilder):
    prompt: tuple[int, ...]

    async def make_envs(self, num_envs: int) -> EnvGroup:
        envs = [Unreliable(Observation(self.prompt)) for _ in range(num_envs)]
        for number, env in enumerate(envs):
            env.number = number
        return EnvGroup(envs)


class UnreliableDataset(SmallDataset):
    @override
    def get_batch(self, generation: int) -> Sequence[EnvGroupBuilder]:
        return [Unreliables((5 + generation, 7)), Unreliables((9, generation + 1, 4))]


@chz.chz
class UnreliableDatasetBuilder(RLDatasetBuilder):
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        return Datasets(UnreliableDataset())


async def test_lost_rollouts_change_nothing_for_the_others(model: Path, tmp_path: Path) -> None:
    """Rewards None and NaN lose a rollout; what the others teach is the same to rounding."""
    found: list[dict[str, torch.Tensor]] = []
    how = {"dataset": UnreliableDatasetBuilder(), "eval_every": 0, "max_failed_fraction": 0.7}
    for attempts in (2, 6):
        log_path = tmp_path / str(attempts)
        await main(grpo_config(model, log_path, **how, attempts=attempts, num_generations=3))
        lost = [row["rollouts/failed"] for row in metrics_of(log_path)[:-1]]
        assert lost == [2 * (attempts - 2)] * 3
        found.append(weights_of(log_path))
    before = load_file(model / "model.safetensors")
    moved = max(float((found[0][name] - before[name]).abs().max()) for name in before)
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, atol=0.02 * moved, rtol=0)
    with pytest.raises(TooManyLostError, match="found NoneType None"):
        strict = chz.replace(
            grpo_config(model, tmp_path / "strict", **how), max_failed_fraction=0.5
        )
        await main(strict)


async def test_an_env_that_rewrites_what_was_said_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its rollout is 2 sequences, .* policy_gradient"):
        await main(grpo_config(model, tmp_path, dataset=Echoes(forgets=True), eval_every=0))


# --- sampling ------------------------------------------------------------------------------------


async def test_engine_and_trl_follow_the_temperature_schedule(model: Path, tmp_path: Path) -> None:
    Listening.heard.clear()
    cold = HotSteps(schedule=Table(generations=(0, 2), factors=(1.0, 0.02)), every=2)
    how = {"engine": Listening(), "temperature_schedule": cold, "learning_rate": 1e-6}
    await main(grpo_config(model, tmp_path, **how, num_generations=5, eval_every=0, beta=0.1))
    temperatures = [request.params.temperature for request in Listening.heard]
    expected = [1.0, 0.51, 0.02, 0.02, 1.0]
    assert temperatures == pytest.approx(
        [t for t in (0, *expected, 0) for _ in range(32 if t else 4)]
    )
    entropies = [row["policy/entropy"] for row in metrics_of(tmp_path)[:-1]]
    # That of the distribution at this temperature; its head is TRL's, set when it is made.
    assert entropies[0] == pytest.approx(entropies[4], rel=0.01)
    assert entropies[0] > entropies[1] > entropies[2] + 0.3
    assert entropies[2] == pytest.approx(entropies[3], rel=0.3)
    assert all(row["policy/kl"] < 1e-6 for row in metrics_of(tmp_path)[:-1]), "the base follows too"


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attempts": 1}, "attempts must be at least 2"),
        ({"sampling": SamplingParams()}, "temperature must be above 0, found 0"),
        ({"temperature_schedule": Table(factors=(0.0,))}, "must stay above 0"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        grpo_config(tmp_path, tmp_path, **changes)


async def test_trl_has_to_be_installed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = "es_cookbook.plugins.gradients.grpo.training"
    monkeypatch.delitem(sys.modules, training, raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ConfigError, match=r"grpo needs trl, .* 'es-cookbook\[baselines\]'"):
        await main(grpo_config(model, tmp_path))


async def test_a_run_that_is_cancelled_ends_and_can_go_on(model: Path, tmp_path: Path) -> None:
    config = grpo_config(model, tmp_path, checkpoint_every=1, eval_every=0)
    with anyio.fail_after(120), anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(main, config)
            while not (tmp_path / "checkpoints").exists():
                await anyio.sleep(0.01)
            scope.cancel()
    assert scope.cancelled_caught
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is None or checkpoint.generation < 4
    await main(chz.replace(config, behavior_if_log_dir_exists="resume"))
    assert [row["progress/generation"] for row in metrics_of(tmp_path)] == [0, 1, 2, 3, 4]


def pushed(push: HubPush) -> TrackersBuilder:
    return TrackersBuilder(**FILES_ALONE, hub=push)


async def test_the_last_checkpoint_is_on_its_branch_byte_for_byte(
    hub: HubServer, model: Path, tmp_path: Path
) -> None:
    push = HubPush(repo_id="me/model", revision="tuned")
    short = {"num_generations": 2, "checkpoint_every": 2, "eval_every": 0}
    await main(grpo_config(model, tmp_path, **short, trackers=pushed(push)))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    branch = "tuned-step-000000002"
    assert set(hub.repositories["me/model"].branches) == {"main", branch}
    kept = {path.name: path.read_bytes() for path in checkpoint.model.iterdir()}
    assert hub.files("me/model", branch) == kept
    assert metrics_of(tmp_path)[-1]["test/reward/mean"] > 0
