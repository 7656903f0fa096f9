"""QES: rounding loses every small step, and error feedback loses none of them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.centre import Centre, merge_steps, moved
from es_cookbook.evolution.exact import apply_rule_
from es_cookbook.evolution.genome import ErrorFeedbackRule, Step, Term
from es_cookbook.evolution.noise import Part
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.full_rank import FullRank, FullRankSpace
from es_cookbook.plugins.quantised.qes import QES
from es_cookbook.plugins.quantised.spaces import QuantCodesSpace

NAME = "w.codes"
SPACE = QuantCodesSpace({NAME: (16, 16)}, highest_code=15)


def last_move(updates_J: Sequence[np.ndarray], decay: float) -> np.ndarray:
    """What the step adds to codes in the middle of a wide range, given each generation's update."""
    shape, start = updates_J[0].shape, 2.0**20
    adders = [
        lambda _, change, __, update=update: change.add_(torch.from_numpy(update.astype("f4")))
        for update in updates_J
    ]
    codes, count = torch.full(shape, start), len(updates_J)
    rule = ErrorFeedbackRule((1,) * count, (1.0,) * count, decay, 2**21)
    apply_rule_(rule, adders, NAME, codes, Part.whole(shape), shape)
    return codes.numpy() - start


def moves(updates_J: Sequence[np.ndarray], decay: float, window: int) -> np.ndarray:
    """What all of a run's steps add."""
    count = len(updates_J)
    return np.array(
        [last_move(updates_J[max(0, j + 1 - window) : j + 1], decay) for j in range(count)]
    )


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


def test_the_recursion_by_hand() -> None:
    """Of s = e / 2 + u: 0.4; 0.6, so 1 and e = -0.4; -0.2; 0.6, so 1; 0.5, so 0 (even); 2."""
    updates_J = [np.array([u]) for u in (0.4, 0.4, 0.0, 0.7, 0.7, 1.75)]
    assert moves(updates_J, 0.5, 9).ravel().tolist() == [0, 1, 0, 1, 0, 2]
    assert moves([np.array([0.5, 1.5, -2.5])], 0.9, 1).tolist() == [[0, 2, -2]]


def test_the_centre_moves_by_the_recursion_and_is_clipped() -> None:
    base = torch.arange(256, dtype=torch.uint8).view(16, 16) % 16
    sizes, weights = (0.5, 0.5, 1.0, 0.3, 0.3), (0.4, -0.7, 0.6, 1.9, 0.8)
    terms = tuple(Term(10 + i, size) for i, size in enumerate(sizes))
    rule = ErrorFeedbackRule((2, 0, 1, 2), weights, 0.9, 15)
    changes = [SPACE.change(NAME, term, 0, 256).reshape(16, 16) for term in terms]
    tried = [weight * change for weight, change in zip(weights, changes, strict=True)]
    moved_by = last_move([tried[0] + tried[1], 0 * tried[0], tried[2], tried[3] + tried[4]], 0.9)
    centre = Centre({NAME: base}, SPACE, 1)
    fingerprint = centre.apply(Step(terms, rule=rule))
    expected = np.clip(base.numpy().astype(np.float32) + moved_by, 0, 15)
    assert np.array_equal(centre.weights[NAME].numpy(), expected)
    beyond = base.numpy() + moved_by
    assert beyond.max() > 15 and beyond.min() < 0, "so it is clipped on both sides"
    alone = moved(NAME, base, SPACE, merge_steps([Step(terms, rule=rule)]))
    assert torch.equal(alone, centre.weights[NAME])
    assert Centre({NAME: base}, SPACE, 2).restore([Step(terms, rule=rule)]) == fingerprint


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


def test_other_spaces_and_decay_are_refused() -> None:
    with pytest.raises(ConfigError, match="qes moves whole numbers: add search_space=quant"):
        QES()(run_seed=0, num_generations=1, space=FullRankSpace({"w": (2,)}))
    with pytest.raises(ConfigError, match=r"weight_decay must be 0 with qes, found 0.1"):
        QES(weight_decay=0.1)
    with pytest.raises(ConfigError, match="residual_decay must be in"):
        QES(residual_decay=1.0)
    with pytest.raises(ConfigError, match="qes moves whole numbers"):
        QES().check_run(FullRank(), 1)
