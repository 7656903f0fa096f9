"""Individuals breed, the champion is the centre, and no genome outgrows an engine."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.centre import Centre
from es_cookbook.evolution.genome import Genome, MuonRule, Step, Term
from es_cookbook.evolution.schedules import Linear
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.plugins.genetic.optimizer import (
    BASE,
    Gene,
    Genetic,
    Individual,
    Parent,
    behaviour_apart,
    difference,
    genes_apart,
    in_order,
    quotas,
    species_of,
    step_between,
    uniform,
)
from es_cookbook.plugins.quantised.spaces import QuantCodesSpace

NAN = math.nan
SPACE = FullRankSpace(shapes={"x": (6,)})
SMALL = Genetic(population_size=4, sigma=0.5, tournament_size=1, crossover_rate=0.0)


def at_chance(population_size: int, **fields: Any) -> Genetic:
    """Whoever is drawn breeds, if they are not too bad."""
    settings = {"sigma": 0.5, "tournament_size": 1, "truncation": 1.0} | fields
    return Genetic(population_size=population_size, **settings)


def build(config: Genetic, run_seed: int = 0, num_generations: int = 400) -> Any:
    return config(run_seed=run_seed, num_generations=num_generations, space=SPACE)


def tell(optimizer: Any, generation: int, *fitness_G: float) -> Step:
    return optimizer.tell(generation, optimizer.ask(generation), None, np.array(fitness_G))


def gene(birth: int, coefficient: float = 0.5) -> Gene:
    return Gene(birth, 100 + birth, coefficient)


def genes(*births: int) -> Individual:
    return frozenset(map(gene, births))


def coefficients(terms: Sequence[Term]) -> dict[int, float]:
    return {term.seed: term.coefficient for term in terms}


def of(individual: Individual) -> dict[int, float]:
    return {gene.seed: gene.coefficient for gene in individual}


@functools.cache
def noise(seed: int, dimension: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(dimension)


def point(individual: Individual, dimension: int) -> np.ndarray:
    drawn = [gene.coefficient * noise(gene.seed, dimension) for gene in sorted(individual)]
    return sum(drawn, np.zeros(dimension))


def evolved(
    config: Genetic,
    fitness: Callable[[np.ndarray], float],
    dimension: int,
    generations: int,
    run_seed: int = 0,
) -> tuple[Any, np.ndarray]:
    """The optimizer after so many generations, and the points of the last population."""
    optimizer, points_G = build(config, run_seed), np.zeros((1, dimension))
    for generation in range(generations):
        genomes_G = optimizer.ask(generation)
        members_G = optimizer.population(generation).members_G
        points_G = np.array([point(member.individual, dimension) for member in members_G])
        optimizer.tell(generation, genomes_G, None, np.array([fitness(x) for x in points_G]))
    return optimizer, points_G


# The algebra.


individuals = st.dictionaries(st.integers(0, 12), st.sampled_from((0.5, -0.5))).map(
    lambda held: frozenset(gene(birth, coefficient) for birth, coefficient in held.items())
)


@given(individuals, individuals)
def test_a_centre_and_a_genome_make_the_individual(a: Individual, b: Individual) -> None:
    found = of(b)
    for term in difference(a, b):
        found[term.seed] = found.get(term.seed, 0.0) + term.coefficient
    assert {seed: c for seed, c in found.items() if c} == of(a)
    assert len(difference(a, b)) == genes_apart(Parent(a), Parent(b))


@given(individuals, individuals, st.integers(0, 2**13 - 1))
def test_a_child_has_nothing_that_no_parent_has_and_all_that_both_have(
    a: Individual, b: Individual, coins: int
) -> None:
    crossed = uniform(a, b, lambda birth: bool(coins >> birth & 1))
    assert a & b <= crossed <= a | b
    assert len({gene.birth for gene in crossed}) == len(crossed)
    assert uniform(b, a, lambda birth: not coins >> birth & 1) == crossed


def test_the_step_goes_on_or_back_to_the_base() -> None:
    def step(a: Individual, b: Individual) -> Step:
        return step_between(in_order([], a), in_order([], b))

    one, three, both = Term(101, 0.5), Term(103, 0.5), (Term(101, 0.5), Term(103, 0.5))
    assert step(genes(1), genes(1, 3)) == Step((three,))
    assert step(genes(1), genes(1)) == Step()
    assert step(genes(3), genes(1, 3)) == Step(both, decay=1.0), "in the order of birth"
    assert step(genes(3), genes(1)) == Step((one,), decay=1.0)
    assert step(genes(3), BASE) == Step(decay=1.0)
    trunk = [gene(2)]
    assert in_order(trunk, genes(1, 3)) == [gene(1), gene(2), gene(3)]


def test_genomes_of_quantised_codes_equal_the_individuals_bit_for_bit() -> None:
    space = QuantCodesSpace(shapes={"w": (40, 30)}, highest_code=15)
    codes = {"w": torch.full((40, 30), 7.0)}
    a, b = frozenset({gene(0), gene(1, -0.5), gene(4)}), frozenset({gene(0), gene(1), gene(2)})
    centre = Centre(codes, space, num_threads=1)
    centre.apply(step_between([], in_order([], a)))
    individual = centre.weights["w"].clone()
    centre.apply(step_between(in_order([], a), in_order([], b)))
    assert not torch.equal(centre.weights["w"], individual)
    assert torch.equal(centre.perturbed(Genome(difference(a, b)), "w"), individual)


# Selection.


def parents(*fitness: float) -> list[Parent]:
    return [Parent(genes(i), f) for i, f in enumerate(fitness)]


def test_species_gather_around_the_best() -> None:
    first, near, far = genes(1), genes(1, 2), genes(5, 6, 7)
    made = [Parent(first, 3.0), Parent(far, 2.0), Parent(near, 1.0)]
    assert species_of(made, genes_apart, 1) == [[made[0], made[2]], [made[1]]]
    assert species_of(made, genes_apart, 0) == [[made[0]], [made[1]], [made[2]]]
    assert species_of(made, genes_apart, 4) == [made]
    assert species_of(made, genes_apart, None) == [made]


def doing(*rewards_P: float) -> Parent:
    return Parent(BASE, 0.0, rewards_P)


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (doing(1, 0, 1, 1), doing(0, 0, 1, 1), 0.25),
        (doing(0.0, 0.0), doing(0.5, -0.25), 0.375),
        (doing(1, NAN, 0), doing(0, 1, 0), 0.5),
        (doing(1, NAN), doing(NAN, 1), math.inf),
    ],
)
def test_behaviour_is_apart_by_the_mean_gap_over_the_problems_that_both_have(
    a: Parent, b: Parent, apart: float
) -> None:
    assert behaviour_apart(a, b) == behaviour_apart(b, a) == apart


def test_children_go_by_the_mean_rank_of_a_species_and_not_by_its_size() -> None:
    five, two = parents(9.0, 1.0, 1.0, 1.0, 1.0), parents(5.0, 4.0)
    assert quotas([five, two], 17) == [6, 11], "mean ranks are 3.4 and 5.5"
    assert quotas([parents(2.0), parents(1.0)], 2) == [1, 1]
    assert quotas([parents(0.0, 0.0, 0.0), parents(0.0)], 10) == [5, 5]


# The whole.


def test_the_centre_becomes_the_champion_and_the_elite_is_asked_again() -> None:
    optimizer = build(SMALL)
    genomes_G = optimizer.ask(0)
    assert tell(optimizer, 0, 0.0, 1.0, 3.0, 2.0) == Step(genomes_G[2].terms)
    elite, *children = optimizer.ask(1)
    assert elite == Genome()
    # Truncation to the best of four: all are the champion's.
    assert [len(genome.terms) for genome in children] == [1, 1, 1]
    assert tell(optimizer, 1, 3.0, 1.0, 0.0, 2.0) == Step(), "the champion stays"
    assert tell(optimizer, 2, 3.0, 3.0, 0.0, 2.0) == Step(), "of equals, too"
    grandchild = optimizer.ask(3)[3]
    assert tell(optimizer, 3, 0.0, 1.0, 2.0, 3.0) == Step(grandchild.terms)


def test_ties_move_nothing_and_the_same_parents_have_other_children() -> None:
    optimizer = build(SMALL)
    tell(optimizer, 0, 0.0, 1.0, 2.0, 3.0)
    champion, asked = optimizer.champion, optimizer.ask(1)
    for fitness_G in [(7.0,) * 4, (NAN,) * 4, (NAN, 1.0, NAN, NAN)]:
        assert tell(optimizer, 1, *fitness_G) == Step()
        assert optimizer.champion == champion and optimizer.ask(1) == asked
    others = optimizer.ask(2)
    assert others[0] == asked[0] and not set(others[1:]) & set(asked[1:])


def test_lost_genomes_are_neither_champions_nor_parents_nor_elites() -> None:
    optimizer = build(SMALL)
    genomes_G = optimizer.ask(0)
    assert tell(optimizer, 0, NAN, 1.0, NAN, 0.0) == Step(genomes_G[1].terms)
    for number in range(1, 50):
        for member in optimizer.population(number).members_G:
            inherited = member.individual - {member.mutation}
            assert of(inherited) == coefficients(genomes_G[1].terms)


def test_children_are_those_that_recorded_runs_have() -> None:
    """Pinned, by the births of their genes: resumed runs breed them again."""
    optimizer = build(at_chance(6, crossover_rate=0.5, max_terms=20))
    for generation in range(3):
        tell(optimizer, generation, 0.0, 4.0, 1.0, 3.0, 2.0, 5.0)
    members_G = optimizer.population(3).members_G
    births = [sorted(gene.birth for gene in member.individual) for member in members_G]
    assert births == [
        [2, 11, 18],
        [10, 11, 15, 21],
        [4, 7, 17, 22],
        [2, 11, 15, 17, 23],
        [2, 11, 18, 24],
        [2, 11, 15, 18, 25],
    ]


fitnesses = st.sampled_from([NAN, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
configs = st.fixed_dictionaries(
    {
        "population_size": st.integers(6, 12),
        "max_terms": st.integers(1, 9),
        "num_elites": st.integers(0, 2),
        "num_islands": st.integers(1, 2),
        "crossover": st.sampled_from(["union", "uniform"]),
        "crossover_rate": st.sampled_from([0.0, 0.5, 1.0]),
        "truncation": st.sampled_from([0.3, 1.0]),
        "species_distance": st.sampled_from([None, 0, 3]),
        "es_weight": st.sampled_from([0.0, 0.1]),
        "merge_every": st.sampled_from([0, 4]),
    }
).map(lambda fields: Genetic(sigma=0.5, migration_every=3, **fields))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(configs, st.data())
def test_no_genome_outgrows_an_engine_and_the_centre_is_the_champion_to_the_bit(
    config: Genetic, data: st.DataObject
) -> None:
    optimizer, told = build(config), list[tuple[float, ...]]()
    base = {"x": torch.tensor([0.0, -0.0, 1.0, -1e-3, 300.0, 1e-30])}
    centre, steps = Centre(base, SPACE, num_threads=1), list[Step]()
    placed: list[Term] = []
    for generation in range(25):
        genomes_G = optimizer.ask(generation)
        members_G = optimizer.population(generation).members_G
        assert len(genomes_G) == len(members_G) == config.population_size
        champion = of(optimizer.champion)
        for genome, member in zip(genomes_G, members_G, strict=True):
            assert len(genome.terms) <= config.max_terms
            whole = dict(champion)
            for term in genome.terms:
                whole[term.seed] = whole.get(term.seed, 0.0) + term.coefficient
            assert {seed: c for seed, c in whole.items() if c} == of(member.individual)
        told.append(tuple(data.draw(fitnesses) for _ in genomes_G))
        steps.append(tell(optimizer, generation, *told[-1]))
        moved = centre.apply(steps[-1])
        # What was added since the last return to the base is all that there is.
        placed = [*(placed if steps[-1].decay == 0 else []), *steps[-1].terms]
        champions = [Term(g.seed, g.coefficient) for g in sorted(optimizer.champion)]
        rest = iter(placed)
        assert all(term in rest for term in champions), "in the order of birth"
        assert config.es_weight or config.merge_every or placed == champions
        weight = base["x"].numpy().copy()
        SPACE.add_terms_("x", torch.from_numpy(weight), placed)
        assert centre.weights["x"].numpy().tobytes() == weight.tobytes()
    assert Centre(base, SPACE, num_threads=1).restore(steps) == moved

    again = build(config)
    assert [tell(again, g, *fitness_G) for g, fitness_G in enumerate(told)] == steps
    assert again.ask(25) == optimizer.ask(25)


def test_those_that_outgrew_do_not_breed_and_are_counted() -> None:
    optimizer = build(at_chance(6, max_terms=2))
    tell(optimizer, 0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    # The base is one seed from the champion, its other mutants are two.
    for member in optimizer.population(1).members_G:
        assert member.individual - {member.mutation} in (BASE, optimizer.champion)
    tell(optimizer, 1, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert optimizer.metrics() == {"genetic/outgrown": 4, "genetic/species": 1}


def test_es_moves_everybody_by_the_new_mutations() -> None:
    optimizer = build(at_chance(3, es_weight=0.8, truncation=0.1))
    _, first, second = (genome.terms for genome in optimizer.ask(0))
    trunk = (Term(first[0].seed, 0.4 * 1.0), Term(second[0].seed, 0.4 * -1.0))
    assert tell(optimizer, 0, 0.0, 3.0, 1.0) == Step((*first, *trunk)), "the baseline is 2"
    assert [len(genome.terms) for genome in optimizer.ask(1)] == [0, 1, 1]
    _, third, fourth = (genome.terms for genome in optimizer.ask(1))
    trunk = (Term(third[0].seed, -0.4), Term(fourth[0].seed, 0.4))
    assert tell(optimizer, 1, 4.0, 1.0, 3.0) == Step(trunk), "the champion stays, and moves"
    assert tell(optimizer, 2, 4.0, 1.0, NAN) == Step(), "one alone has nothing to differ from"


def test_merging_makes_one_of_all_and_everybody_begins_there() -> None:
    optimizer = build(at_chance(3, truncation=0.1, merge_every=2, es_weight=0.8))
    _, first, _ = (genome.terms for genome in optimizer.ask(0))
    tell(optimizer, 0, 0.0, 3.0, 1.0)
    _, third, fourth = (genome.terms for genome in optimizer.ask(1))
    # All three hold `first`, which stays; of the new seeds one is as good as the mean, 1.
    assert tell(optimizer, 1, 0.0, 1.0, 2.0) == Step((Term(fourth[0].seed, 0.4),))
    members_G = optimizer.population(2).members_G
    assert [len(genome.terms) for genome in optimizer.ask(2)] == [0, 1, 1]
    held = {gene.seed for member in members_G for gene in member.individual}
    assert held.isdisjoint({first[0].seed, third[0].seed, fourth[0].seed})


def test_islands_breed_by_themselves_until_their_best_move_on() -> None:
    config = Genetic(population_size=12, num_islands=3, migration_every=4, max_terms=50, sigma=0.5)
    optimizer, rng = build(config), np.random.Generator(np.random.PCG64(1))
    for generation in range(5):
        members_G = optimizer.population(generation).members_G
        held: list[set[int]] = [set() for _ in range(3)]
        for member in members_G:
            held[member.island] |= {gene.seed for gene in member.individual}
        shared = [a & b for a, b in itertools.combinations(held, 2)]
        assert any(shared) == (generation == 4)
        optimizer.tell(generation, optimizer.ask(generation), None, rng.standard_normal(12))


def test_it_climbs_a_quadratic() -> None:
    target = np.linspace(-1, 1, 20)
    config = Genetic(population_size=30, sigma=0.1, sigma_schedule=Linear(final=0.3))
    optimizer, _ = evolved(config, lambda x: -np.square(x - target).sum(), 20, 150)
    assert np.square(target).sum() > 7
    assert np.square(point(optimizer.champion, 20) - target).sum() < 0.3


def test_a_fork_goes_on_from_what_led_there() -> None:
    steps = [Step((Term(1, 0.5),)), Step((Term(2, 0.5),), decay=1.0), Step(), Step((Term(3, 1.0),))]
    optimizer = build(at_chance(3, num_elites=2))
    optimizer.begin_after(steps)
    _, first, second = optimizer.ask(4)
    assert tell(optimizer, 4, 0.0, 2.0, 1.0) == Step(first.terms)
    inherited = (Term(2, 0.5), Term(3, 1.0))
    assert tell(optimizer, 5, 1.0, 2.0, 0.0) == Step((*inherited, *second.terms), decay=1.0)
    for bad in (Step((Term(1, 0.5),), decay=0.1), Step((), rule=MuonRule(1.0, 5))):
        with pytest.raises(ConfigError, match="cannot go on after steps with weight decay"):
            build(SMALL).begin_after([bad, Step()])
        build(SMALL).begin_after([bad, Step(decay=1.0)])
    optimizer = build(at_chance(3))
    optimizer.begin_after(steps[:1])
    first = optimizer.ask(0)[1]
    assert tell(optimizer, 0, 0.0, 2.0, 1.0) == Step(first.terms), "behind all that was there"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"population_size": 9, "num_islands": 4}, "must be at least 12 .* found 9"),
        ({"species_by": "behaviour"}, "species_by=behaviour needs species_distance=...: how much"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Genetic(**fields)
