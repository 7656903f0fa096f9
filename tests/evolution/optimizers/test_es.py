"""ES asks for mirrored pairs, moves towards fitness, and stays put when nothing was learnt."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.fitness import ZScore
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.noise import Partitions, partition_of
from es_cookbook.evolution.optimizers.adam import Adam, RMSProp
from es_cookbook.evolution.optimizers.base import Optimizer, mirrored
from es_cookbook.evolution.optimizers.es import ES, AdaptiveSigma, merged, step_length
from es_cookbook.evolution.optimizers.momentum import ClipUp, Muon
from es_cookbook.evolution.schedules import Cosine, Linear, Table
from es_cookbook.evolution.spaces.base import Shares
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.evolution.spaces.low_rank import LowRank, LowRankSpace
from es_cookbook.plugins.quantised.qes import QES
from tests.settled import settled

NAN = math.nan
SPACE = FullRankSpace(shapes={"x": (4,)})


def optimizer(config: ES, num_generations: int = 10) -> Optimizer:
    return config(run_seed=0, num_generations=num_generations, space=SPACE)


def tell(config: ES, *fitness_G: float) -> tuple[list[Genome], Step]:
    es = optimizer(config)
    genomes_G = es.ask(0)
    return genomes_G, es.tell(0, genomes_G, None, np.array(fitness_G))


def seeds(genomes_G: list[Genome]) -> list[int]:
    return [term.seed for genome in genomes_G for term in genome.terms]


def test_genomes_come_in_mirrored_pairs_of_fresh_seeds() -> None:
    es = optimizer(settled(population_size=6, sigma=0.01))
    genomes_G = es.ask(3)
    for plus, minus in zip(genomes_G[::2], genomes_G[1::2], strict=True):
        assert plus.terms[0].coefficient == 0.01
        assert mirrored(plus) == minus
    assert len(set(seeds(genomes_G))) == 3
    everything = [seed for generation in range(50) for seed in seeds(es.ask(generation))[::2]]
    assert len(set(everything)) == len(everything)


def test_asking_is_a_pure_function_of_run_seed_and_generation() -> None:
    config = settled(population_size=4)
    again = config(run_seed=1, num_generations=9, space=SPACE)
    again.tell(0, again.ask(0), None, np.array([1.0, 2.0, 3.0, 4.0]))
    assert again.ask(5) == config(run_seed=1, num_generations=9, space=SPACE).ask(5)
    assert again.ask(5) != config(run_seed=2, num_generations=9, space=SPACE).ask(5)


def partitioned(number: int) -> LowRankSpace:
    shapes = {f"{i}.weight": (3, 2) for i in range(4)}
    units = {name: i for i, name in enumerate(shapes)}
    shares = Shares(num_partitions=number, units=units, sizes=(6,) * 4)
    return LowRankSpace(shapes, shares=shares, rank=1)


@pytest.mark.parametrize("antithetic", [True, False])
def test_genomes_of_a_generation_share_a_partition_out_equally(antithetic: bool) -> None:
    config = settled(population_size=16, antithetic=antithetic)
    es = config(run_seed=0, num_generations=10, space=partitioned(4))
    for generation in range(3):
        genomes_G = es.ask(generation)
        partitions = {partition_of(seed) for seed in seeds(genomes_G)}
        assert len(partitions) == 1
        assert len(set(seeds(genomes_G))) == (8 if antithetic else 16)
        groups = Counter(Partitions(4).group(seed) for seed in seeds(genomes_G))
        assert groups == {0: 4, 1: 4, 2: 4, 3: 4}
    assert partition_of(seeds(es.ask(0))[0]) != partition_of(seeds(es.ask(1))[0])


@pytest.mark.parametrize(("size", "antithetic"), [(6, True), (3, False)])
def test_more_partitions_than_seeds_are_refused(size: int, antithetic: bool) -> None:
    config = settled(population_size=size, antithetic=antithetic)
    with pytest.raises(ConfigError, match=r"partitions needs 4 to 65,536 seeds .* gives 3"):
        config.check_run(LowRank(partitions=4), 1)


def test_the_step_is_the_formula_with_one_term_a_pair() -> None:
    config = settled(population_size=4, sigma=0.1, learning_rate=0.8)
    genomes_G, step = tell(config, 1.0, -0.5, 0.25, 2.0)
    first, _, second, _ = seeds(genomes_G)
    assert step == Step(terms=(Term(first, 0.2 * 1.5), Term(second, 0.2 * -1.75)))


def test_without_antithetic_the_step_is_the_fitness_weighted_sum() -> None:
    config = settled(population_size=2, sigma=0.1, learning_rate=1.0, antithetic=False)
    genomes_G, step = tell(config, 3.0, -1.0)
    first, second = seeds(genomes_G)
    assert step.terms == (Term(first, 1.5), Term(second, -0.5))


def test_a_pair_that_ties_has_no_term_and_no_signal_at_all_is_an_empty_step() -> None:
    config = settled(population_size=4)
    genomes_G, step = tell(config, 0.3, 0.3, 1.0, 0.0)
    assert [term.seed for term in step.terms] == [seeds(genomes_G)[2]]
    assert tell(config, 0.3, 0.3, 0.7, 0.7)[1] == Step()
    assert tell(config, 0.0, 0.0, 0.0, 0.0)[1] == Step()
    assert tell(settled(population_size=3, antithetic=False), 0.0, 0.0, 0.0)[1] == Step()


def test_a_lost_genome_takes_its_twin_with_it_and_the_others_count_as_the_population() -> None:
    config = settled(population_size=4, learning_rate=1.0)
    genomes_G, step = tell(config, NAN, 5.0, 1.0, 0.0)
    assert step.terms == (Term(seeds(genomes_G)[2], 0.5),)
    assert tell(config, NAN, 1.0, 1.0, NAN)[1] == Step()
    alone = settled(population_size=3, learning_rate=1.0, antithetic=False)
    assert [term.coefficient for term in tell(alone, NAN, 1.0, -1.0)[1].terms] == [0.5, -0.5]


def test_schedules_and_warm_up_scale_sigma_and_the_step() -> None:
    config = settled(
        population_size=2,
        sigma=0.1,
        learning_rate=1.0,
        sigma_schedule=Linear(final=0.5),
        learning_rate_schedule=Cosine(),
        warmup_generations=2,
    )
    es = optimizer(config, num_generations=10)
    assert [es.sigma(generation) for generation in (0, 5)] == pytest.approx([0.1, 0.075])
    assert es.ask(5)[0].terms[0].coefficient == pytest.approx(0.075)
    coefficients = [
        es.tell(generation, es.ask(generation), None, np.array([1.0, -1.0])).terms[0].coefficient
        for generation in (0, 1, 5)
    ]
    assert coefficients == pytest.approx([0.5, (1 + math.cos(math.pi / 10)) / 2, 0.5])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            lambda: settled(population_size=7),
            "population_size must be even with antithetic=True.* found 7",
        ),
        (
            lambda: settled(population_size=1, antithetic=False),
            "population_size must be at least 2, found 1",
        ),
        (
            lambda: settled(adaptive_sigma=AdaptiveSigma()),
            "adaptive_sigma compares.*evaluate_centre=Tru",
        ),
        (
            lambda: settled(sigma_schedule=Table(generations=(0, 4), factors=(1, 0))).check_run(
                LowRank(), 10
            ),
            "sigma_schedule reaches 0 at generation 4 of 10",
        ),
    ],
)
def test_fields_that_cannot_work_are_refused_at_construction(
    config: Callable[[], object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config()


def test_the_size_of_a_step_is_known_from_its_coefficients() -> None:
    # ES at Scale: N = 30, z-scored fitness, learning rate σ/2; unpaired, so that Σ fitness² = N.
    config = settled(population_size=30, sigma=1e-3, learning_rate=5e-4, antithetic=False)
    fitness_G = ZScore()(np.arange(30.0)[None, :])
    _, step = tell(config, *fitness_G)
    assert step.rms / 1e-3 == pytest.approx(0.0913, abs=1e-4)
    rng = np.random.Generator(np.random.PCG64(0))
    noise = rng.standard_normal((len(step.terms), 100_000))
    update = np.array([term.coefficient for term in step.terms]) @ noise
    assert math.sqrt(float((update**2).mean())) / 1e-3 == pytest.approx(0.0913, rel=0.02)
    assert Step().rms == 0


def test_weight_decay_follows_the_schedule_and_waits_for_signal() -> None:
    config = settled(
        population_size=2, weight_decay=0.1, learning_rate_schedule=Linear(), warmup_generations=2
    )
    es = optimizer(config)
    steps = [es.tell(t, es.ask(t), None, np.array([1.0, 0.0])) for t in range(3)]
    assert [step.decay for step in steps] == pytest.approx([0.05, 0.09, 0.08])
    assert es.tell(3, es.ask(3), None, np.array([1.0, 1.0])) == Step()
    plain = optimizer(
        settled(population_size=2, learning_rate_schedule=Linear(), warmup_generations=2)
    )
    assert steps[0].terms == plain.tell(0, plain.ask(0), None, np.array([1.0, 0.0])).terms


def test_the_centre_is_the_last_genome_and_the_baseline_without_pairs() -> None:
    config = settled(population_size=2, learning_rate=1.0, antithetic=False, evaluate_centre=True)
    genomes_G, step = tell(config, 3.0, -1.0, 2.0)
    assert genomes_G[-1] == Genome() and len(genomes_G) == 3
    first, second = seeds(genomes_G)
    assert step.terms == (Term(first, 0.5), Term(second, -1.5))
    # Without the centre's own fitness there is the mean's, which fitness has taken off already.
    assert tell(config, 3.0, -1.0, NAN)[1].terms == (Term(first, 1.5), Term(second, -0.5))


@pytest.mark.parametrize(
    ("centre", "factor"),
    [
        (1.5, math.exp(0.2 * math.tanh(0.5 - 1.5))),  # 1.5 standard deviations ahead: shrink
        (0.5, 1.0),
        (-1.0, math.exp(0.2 * math.tanh(1.5))),
        (NAN, 1.0),
    ],
)
def test_sigma_follows_the_centres_lead_over_its_neighbours(centre: float, factor: float) -> None:
    adaptive = AdaptiveSigma(rate=0.2, target=0.5)
    config = settled(population_size=2, sigma=0.01, evaluate_centre=True, adaptive_sigma=adaptive)
    es = optimizer(config)
    assert es.sigma(0) == 0.01
    es.tell(0, es.ask(0), None, np.array([1.0, -1.0, centre]))  # mean 0, standard deviation 1
    assert es.sigma(1) == pytest.approx(0.01 * factor)
    assert es.sigma(0) == 0.01, "what generation 0 was perturbed by"
    assert es.ask(1)[0].terms[0].coefficient == es.sigma(1)
    assert not config.asks_ahead


def test_sigma_stays_within_its_bounds_and_where_nothing_was_learnt() -> None:
    adaptive = AdaptiveSigma(rate=10.0, smallest=0.5, largest=2.0)
    config = settled(population_size=2, sigma=0.01, evaluate_centre=True, adaptive_sigma=adaptive)
    es = optimizer(config)
    es.tell(0, es.ask(0), None, np.array([1.0, 1.0, 5.0]))
    assert es.sigma(1) == 0.01
    es.tell(1, es.ask(1), None, np.array([1.0, 0.0, 50.0]))
    assert es.sigma(2) == pytest.approx(0.005)
    es.tell(2, es.ask(2), None, np.array([1.0, 0.0, -50.0]))
    assert es.sigma(3) == pytest.approx(0.02)


def test_a_sharpness_aware_step_with_decay_takes_its_first_half_back() -> None:
    config = settled(population_size=4, sharpness=0.5, weight_decay=0.2)
    assert not config.asks_ahead
    es = optimizer(config)
    for generation in (0, 2):
        away = es.tell(generation, es.ask(generation), None, np.array([2.0, -1.0, 0.5, 1.0]))
        genomes_G = es.ask(generation + 1)
        step = es.tell(generation + 1, genomes_G, None, np.array([0.0, 1.0, -2.0, 2.0]))
        assert (away.decay, step.decay) == (0.0, 0.2)
        assert step.terms[:2] == tuple(Term(t.seed, -0.8 * t.coefficient) for t in away.terms)
        assert [term.seed for term in step.terms[2:]] == seeds(genomes_G)[::2]
    last, fitness_G = optimizer(settled(population_size=4)), np.arange(4.0)
    assert es.tell(4, es.ask(4), None, fitness_G) != last.tell(4, last.ask(4), None, fitness_G)
    es = optimizer(settled(population_size=4, sharpness=0.5), 5)
    assert es.tell(4, es.ask(4), None, fitness_G) == last.tell(4, last.ask(4), None, fitness_G)


def test_sharpness_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fork at an even generation, found 1"):
        optimizer(settled(sharpness=1.0)).begin_after([Step()])
    optimizer(settled(sharpness=1.0)).begin_after([Step()] * 2)
    optimizer(settled()).begin_after([Step()])
    for other in (Adam, RMSProp, Muon, QES):
        with pytest.raises(ConfigError, match=rf"sums of noise .* not for {other.__name__}"):
            other(sharpness=1.0)


def test_a_step_is_as_long_as_alpha_over_the_root_of_the_population() -> None:
    es = {"learning_rate": 0.8, "population_size": 16}
    assert step_length(es) == 0.2 and step_length(es, 0.5) == 0.1
    assert step_length({**es, "learning_rate": "auto"}) == "auto"
    # A push counts 1 + 0.9 + ... + 0.9⁹ = 6.5132 times.
    carried = ClipUp.carried({**es, "sigma": 0.01})
    assert carried["learning_rate"] == pytest.approx(0.2 / 6.5132, rel=1e-4)
    assert carried["max_speed"] == pytest.approx(0.4 / 6.5132, rel=1e-4)
    assert carried["sigma"] == 0.01 and Adam.carried(es)["learning_rate"] == 0.2
    assert QES.carried({**es, "sigma": 0.01}) == {"population_size": 16}


def test_with_a_found_learning_rate_fitness_counts_in_units_of_its_rms_so_far() -> None:
    es = optimizer(settled(population_size=4, sigma=0.1, learning_rate=2.0))
    es.divides_fitness = True
    assert (es.learning_rate(0), es.metrics()) == (2.0, {"fitness/rms": 1.0})

    def coefficients(generation: int, *fitness_G: float) -> list[float]:
        step = es.tell(generation, es.ask(generation), None, np.array(fitness_G))
        return [term.coefficient for term in step.terms]

    assert coefficients(0, 0.0, 0.0, 0.0, 0.0) == [], "no signal, which counts for nothing"
    assert coefficients(1, 3.0, -3.0, NAN, 3.0) == pytest.approx([2.0]), "RMS 3, of two genomes"
    # √((3² + 1²) / 2) = √5
    expected = [1 / math.sqrt(5), -1 / math.sqrt(5)]
    assert coefficients(2, 1.0, -1.0, -1.0, 1.0) == pytest.approx(expected)
    assert coefficients(3, NAN, NAN, NAN, NAN) == []
    assert es.learning_rate(4) == pytest.approx(2 / math.sqrt(5))
    assert es.metrics() == {"fitness/rms": pytest.approx(math.sqrt(5))}


def test_merging_averages_what_was_inherited_and_follows_fitness_along_what_is_new() -> None:
    genomes_G = [
        Genome((Term(1, 0.5), Term(10, 0.1))),
        Genome((Term(1, 0.25), Term(2, 1.0), Term(11, -0.1))),
        Genome((Term(12, 0.1),)),
    ]
    terms = merged(genomes_G, np.array([3.0, 1.5, NAN]), {1, 2}, rate=1.0)
    assert terms == (Term(1, 0.375), Term(2, 1.0), Term(10, 1.5), Term(11, -0.75))
