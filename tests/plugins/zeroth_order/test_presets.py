"""MeZO, FZOO, LOZO and QZO: steps are their papers' formulas, and engines host LOZO's genomes."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.noise import noise
from es_cookbook.evolution.spaces.base import ParameterInfo
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.plugins.zeroth_order.fzoo import FZOO
from es_cookbook.plugins.zeroth_order.lozo import LOZO, LazyLowRank
from es_cookbook.rl.surrogate import GoldAnswers
from tests.engines.torch.reference import Reference, request, running_engine, sample_all
from tests.preset_steps import NAME, SHAPE, START, Stepped, close, preset
from tests.said import refused


@pytest.mark.parametrize("name", ["mezo", "fzoo", "lozo", "qzo"])
def test_losses_are_those_of_gold_answers(name: str, tmp_path: Path) -> None:
    assert isinstance(preset(name).surrogate, GoldAnswers)
    said = refused("tic_tac_toe", f"preset={name}", f"log_path={tmp_path / 'run'}")
    assert said.startswith("OpeningGroup: it has no gold answer, which surrogate=gold")


def derivative(run: Stepped, epsilon: float) -> float:
    """(L₊ - L₋) / 2ε, with rewards as negative losses."""
    plus, minus = -run.rewards[-1].mean(axis=0)
    return (plus - minus) / (2 * epsilon)


def test_mezo() -> None:
    """θ - η d z, d = (L₊ - L₋) / 2ε."""
    run = Stepped(preset("mezo"))
    found = run.step(0)
    assert run.signs[0] == [1, -1] and len(set(run.seeds[0])) == 1
    assert run.optimizer.sigma(0) == 1e-3
    close(found, START - 1e-7 * derivative(run, 1e-3) * run.noises[0][0])


def test_fzoo() -> None:
    """θ - η/N Σ (l_i - l_0) / s u_i, s the (population) standard deviation of l_1 ... l_N."""
    run = Stepped(preset("fzoo"))
    found = run.step(0)
    assert len(set(run.seeds[0])) == 8 and set(run.signs[0]) == {1.0}
    assert all(set(np.unique(u)) == {-1.0, 1.0} for u in run.noises[0])
    *losses, of_centre = -run.rewards[0].mean(axis=0)
    factors = (np.array(losses) - of_centre) / np.std(losses)
    step = sum((f * u for f, u in zip(factors, run.noises[0], strict=True)), np.zeros(SHAPE))
    close(found, START - 5e-5 / 8 * step)


def test_fzoo_makes_no_step_of_losses_that_are_equal_or_lost() -> None:
    space = LowRank()([ParameterInfo(NAME, SHAPE, "linear")])
    optimizer = FZOO(population_size=3, sigma=0.1, learning_rate=0.1)(
        run_seed=0, num_generations=9, space=space
    )
    genomes_G = optimizer.ask(0)
    rounded = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.0]
    for fitness in ([1.0, 1.0, 1.0, 0.0], rounded, [math.nan] * 4, [1.0, math.nan, math.nan, 0.0]):
        assert not optimizer.tell(0, genomes_G, None, np.array(fitness)).terms
    lost_centre = np.array([2.0, 1.0, 3.0, math.nan])
    assert len(optimizer.tell(0, genomes_G, None, lost_centre).terms) == 3


def factors(seed: int) -> tuple[np.ndarray, np.ndarray]:
    u = noise(seed, f"{NAME}.A", (SHAPE[0], 2)).astype(np.float64)
    return u, noise(seed // 2**16, f"{NAME}.lazy", (SHAPE[1], 2)).astype(np.float64)


def test_lozo() -> None:
    """θ - η d U Vᵀ / r, d = (L(θ + ε U Vᵀ) - L(θ - ε U Vᵀ)) / 2ε; V stays for 50 steps."""
    config = preset("lozo")
    run = Stepped(config, num_generations=101)
    found = run.step(0)
    u, v = factors(run.seeds[0][0])
    close(found, START - 1e-7 * derivative(run, 1e-3) * u @ v.T / 2)
    (plus, _) = run.optimizer.ask(0)
    perturbed = np.zeros(SHAPE, np.float32)
    run.space.add_terms_(NAME, torch.from_numpy(perturbed), plus.terms)
    np.testing.assert_allclose(perturbed, 1e-3 * u @ v.T, rtol=1e-4, atol=1e-9)
    seeds = [run.optimizer.ask(generation)[0].terms[0].seed for generation in range(101)]
    assert len(set(seeds)) == 101
    periods = [seed // 2**16 for seed in seeds]
    assert len(set(periods)) == 3 and len(set(periods[:50])) == 1 and len(set(periods[50:100])) == 1


def test_qzo() -> None:
    """S - η clip(d, -C, C) z, C = 100, of a factor s on each scale."""
    run, expected = Stepped(preset("qzo"), kind="scales"), START.astype(np.float64)
    found: list[float] = []
    for generation in range(40):
        moved = run.step(generation)
        found.append(derivative(run, 1e-3))
        expected = expected - 1e-7 * np.clip(found[-1], -100, 100) * run.noises[-1][0]
        close(moved, expected)
    assert any(abs(d) > 100 for d in found) and any(0 < abs(d) < 100 for d in found)


def test_lozo_needs_its_space_and_few_enough_seeds() -> None:
    with pytest.raises(ConfigError, match="add search_space=lazy_low_rank, found LowRank"):
        LOZO().check_run(LowRank(), 1)
    with pytest.raises(ConfigError, match=r"must be at most 65,536, found 66,000"):
        LOZO(population_size=66, interval=1000)
    with pytest.raises(ConfigError, match="partitions must be 1 with lazy_low_rank, found 2"):
        LazyLowRank(partitions=2)
    with pytest.raises(ConfigError, match="leave antithetic and evaluate_centre out"):
        FZOO(antithetic=True)
    with pytest.raises(ConfigError, match="population_size must be at least 2, found 1"):
        FZOO(population_size=1)


async def test_genomes_with_a_kept_factor_answer_as_their_merged_weights(
    tiny_model: Callable[[str], Path],
) -> None:
    path, space = tiny_model("qwen2"), LazyLowRank(rank=2)
    seeds = (3, 4, 2**16 + 3, 2**40)
    genomes_G = [Genome((Term(seed, sign * 0.1),)) for seed in seeds for sign in (1, -1)]
    asked = [request(g, [5, 7, 9], max_tokens=6) for g in range(len(genomes_G))]
    async with running_engine(path, space) as engine:
        await engine.load(genomes_G)
        actions = await sample_all(engine, asked)
    assert len({action.tokens_T for action in actions}) > 1
    Reference(path, space).check_targets(genomes_G, asked, actions)
