"""QES: rounding loses every small step, and error feedback loses none of them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.centre import Centre, merge_steps, moved
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.optimizers.qes import QES
from es_cookbook.evolution.rules import ErrorFeedbackRule
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.evolution.spaces.quantised import QuantCodesSpace

NAME = "w.codes"
SPACE = QuantCodesSpace({NAME: (16, 16)}, highest_code=15)


def feedback(
    updates_J: Sequence[np.ndarray], decay: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The recursion as its source has it, float64: d and e after each update."""
    residual = np.zeros_like(updates_J[0])
    rounded_J, residual_J = [], []
    for update in updates_J:
        total = decay * residual + update
        rounded_J.append(np.rint(total))
        residual = total - rounded_J[-1]
        residual_J.append(residual)
    return rounded_J, residual_J


def climb(config: ES, generations: int) -> tuple[list[float], Centre]:
    """Mean squared distance of the codes from a target, generation after generation."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(4, 12, (16, 16), generator=generator).to(torch.uint8)
    target = torch.randint(0, 16, (16, 16), generator=generator)
    centre = Centre({NAME: start}, SPACE, 1)
    optimizer = config(run_seed=3, num_generations=generations, space=SPACE)

    def distance(codes: torch.Tensor) -> float:
        return float((codes.clamp(0, 15) - target).square().mean())

    distances = [distance(centre.weights[NAME])]
    for generation in range(generations):
        genomes_G = optimizer.ask(generation)
        fitness_G = np.array([-distance(centre.perturbed(g, NAME)) for g in genomes_G])
        z_G = (fitness_G - fitness_G.mean()) / (fitness_G.std() or 1)
        centre.apply(optimizer.tell(generation, genomes_G, None, z_G))
        distances.append(distance(centre.weights[NAME]))
    return distances, centre


SETTINGS = {"population_size": 32, "sigma": 0.05, "learning_rate": 0.05}


def test_rounding_alone_stands_still_where_error_feedback_climbs() -> None:
    still, _ = climb(QES(**SETTINGS, residual_decay=0.0), 40)
    climbing, centre = climb(QES(**SETTINGS), 40)
    assert still == [still[0]] * 41, "every step is below a half, and is lost"
    assert climbing[-1] < climbing[0] - 0.5
    codes = centre.weights[NAME]
    assert torch.equal(codes, codes.round()) and codes.min() >= 0 and codes.max() <= 15


def test_it_climbs_to_near_the_top() -> None:
    distances, _ = climb(QES(population_size=32, sigma=0.05, learning_rate=0.5), 50)
    assert distances[0] > 20 and distances[-1] < 4


def test_small_steps_of_one_sign_add_up() -> None:
    update = np.full(4, 0.2)
    rounded_J, _ = feedback([update] * 20, 0.9)
    assert sum(rounded_J).tolist() == [4, 4, 4, 4]
    assert not np.any(feedback([update] * 20, 0.0)[0]), "plain rounding loses all of it"
    assert not np.any(feedback([update / 5] * 500, 0.9)[0]), "0.04 < ½ (1 - decay): it saturates"


def test_the_centre_moves_by_the_recursion_and_is_clipped() -> None:
    base = torch.arange(256, dtype=torch.uint8).view(16, 16) % 16
    sizes, weights = (0.5, 0.5, 1.0, 0.3, 0.3), (0.4, -0.7, 0.6, 1.9, 0.8)
    terms = tuple(Term(10 + i, size) for i, size in enumerate(sizes))
    rule = ErrorFeedbackRule((2, 0, 1, 2), weights, 0.9, 15)
    changes = [SPACE.change(NAME, term, 0, 256).reshape(16, 16) for term in terms]
    tried = [weight * change for weight, change in zip(weights, changes, strict=True)]
    updates_J = [tried[0] + tried[1], 0 * tried[0], tried[2], tried[3] + tried[4]]
    rounded_J, _ = feedback(updates_J, 0.9)
    centre = Centre({NAME: base}, SPACE, 1)
    fingerprint = centre.apply(Step(terms, rule=rule))
    expected = np.clip(base.numpy().astype(np.float32) + rounded_J[-1], 0, 15)
    assert np.array_equal(centre.weights[NAME].numpy(), expected)
    assert rounded_J[-1].any() and (base.numpy() + rounded_J[-1]).max() > 15, "so it is clipped"
    alone = moved(NAME, base, SPACE, merge_steps([Step(terms, rule=rule)]))
    assert torch.equal(alone, centre.weights[NAME])
    assert Centre({NAME: base}, SPACE, 2).restore([Step(terms, rule=rule)]) == fingerprint


def test_forgetting_what_left_the_window_changes_little_where_codes_seldom_move() -> None:
    generator = np.random.default_rng(0)
    updates_J = list(generator.normal(0, 0.08, (200, 20_000)))
    everything, residual_J = feedback(updates_J, 0.9)
    bound = 0.5 * 0.9**50
    assert bound < 0.0026
    window, of_window = feedback(updates_J[-50:], 0.9)
    same = np.all(np.array(everything[-50:]) == np.array(window), axis=0)
    assert np.mean(same) > 0.9
    assert np.abs(residual_J[-1] - of_window[-1])[same].max() <= bound + 1e-12
    assert np.mean(everything[-1] != 0) > 0.003, "of 20,000 codes some 80 move"
    assert np.mean(everything[-1] != window[-1]) < 0.0005, "and less than 10 otherwise"
    short = feedback(updates_J[-5:], 0.9)[0]
    assert np.mean(everything[-1] != short[-1]) > 0.002, "5 generations would not do"


def test_where_codes_often_move_the_window_still_follows_the_updates() -> None:
    generator = np.random.default_rng(0)
    updates_J = list(generator.normal(0.05, 0.2, (200, 2000)))
    everything = np.array(feedback(updates_J, 0.9)[0])
    windowed = np.array(
        [feedback(updates_J[max(0, t - 49) : t + 1], 0.9)[0][-1] for t in range(200)]
    )
    assert np.mean(windowed[-1] != everything[-1]) > 0.02, "the moves come at other times"
    wanted = np.sum(updates_J, axis=0).mean()
    assert windowed.sum(0).mean() == pytest.approx(wanted, rel=0.05)
    assert everything.sum(0).mean() == pytest.approx(wanted, rel=0.05)


def test_a_step_has_the_window_of_what_was_tried() -> None:
    config = QES(population_size=4, sigma=0.1, learning_rate=0.2, window=2)
    optimizer = config(run_seed=0, num_generations=9, space=SPACE)
    steps, asked = [], []
    for generation, fitness in enumerate([(1, 0, 3, 1), (1, 1, 2, 2), (0, 1, 0, 0), (1, 0, 0, 1)]):
        asked.append(optimizer.ask(generation))
        steps.append(optimizer.tell(generation, asked[-1], None, np.array(fitness, np.float64)))
    seeds = [[g.terms[0].seed for g in genomes_G[::2]] for genomes_G in asked]
    assert steps[0].terms == (Term(seeds[0][0], 0.1), Term(seeds[0][1], 0.1))
    # α/N · (fitness₊ - fitness₋) / σ = 0.2 / 4 · (1, 2) / 0.1
    assert steps[0].rule == ErrorFeedbackRule((2,), (0.5, 1.0), 0.9, 15)
    assert steps[1] == Step(), "ties only: a residual is never rounded up by itself"
    assert steps[2].rule == ErrorFeedbackRule((0, 1), (-0.5,), 0.9, 15)
    assert steps[3].terms == (
        Term(seeds[2][0], 0.1),
        Term(seeds[3][0], 0.1),
        Term(seeds[3][1], 0.1),
    )
    assert steps[3].rule == ErrorFeedbackRule((1, 2), (-0.5, 0.5, -0.5), 0.9, 15)
    assert steps[3].rms == pytest.approx(0.2 / 4 * 2**0.5), "as plain ES's"


@given(st.floats(0, 0.99), st.lists(st.floats(-3, 3), min_size=1, max_size=30))
def test_nothing_is_lost_but_by_the_decay(decay: float, values: list[float]) -> None:
    rounded_J, residual_J = feedback([np.array(value) for value in values], decay)
    assert all(abs(residual) <= 0.5 for residual in residual_J)
    before = [0.0, *residual_J[:-1]]
    forgotten = sum((1 - decay) * float(residual) for residual in before)
    total = sum(map(float, rounded_J)) + float(residual_J[-1]) + forgotten
    assert total == pytest.approx(sum(values), abs=1e-9)


def test_other_spaces_and_decay_are_refused() -> None:
    with pytest.raises(ConfigError, match="qes moves whole numbers: add search_space=quant"):
        QES()(run_seed=0, num_generations=1, space=FullRankSpace({"w": (2,)}))
    with pytest.raises(ConfigError, match=r"weight_decay must be 0 with qes, found 0.1"):
        QES(weight_decay=0.1)
    with pytest.raises(ConfigError, match="residual_decay must be in"):
        QES(residual_decay=1.0)
    assert Genome() not in QES()(run_seed=0, num_generations=1, space=SPACE).ask(0)
