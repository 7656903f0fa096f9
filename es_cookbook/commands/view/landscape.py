"""The reward around a centre: that of centre + m · (what a genome adds), over a grid of m.

A genome adds Σ coefficient · ε(seed): at m = 1 stands the genome itself, at -1 its mirror image, at
0 the centre. Along one genome this is a curve, along two a map. The run is brought back on its
engine as `play` and `evaluate` do; its held-out problems are attempted as an evaluation attempts
them, greedily by default, so the values differ by the weights and not by luck.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import anyio
import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.rl.grading.workers import end_idle_workers
from es_cookbook.rl.rollouts import mean_rewards
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.report.naming import task_of_dataset
from es_cookbook.runs.report.plots import Line, Map, Size, draw, draw_map
from es_cookbook.train.recorded import RebuiltRun, RecordedRun, rebuild
from es_cookbook.train.stopping.signals import run_until_signal


@chz.chz
class Around:
    """What of a landscape is measured."""

    generation: int | None = chz.field(
        default=None, doc="of the centre and the genomes; the last that has genomes if None"
    )
    genomes: tuple[int, ...] = chz.field(
        default=(), doc="one or two, along which to go; the fittest if none is given"
    )
    reach: float = chz.field(default=3.0, doc="how far: multiples of what a genome adds")
    points: int = chz.field(default=13, doc="on each axis")
    num_problems: int = chz.field(default=100, doc="held-out problems, the first ones")
    trust: tuple[str, ...] = chz.field(
        default=(), doc="packages beside es_cookbook whose code config.json may name"
    )
    model_name: str | None = chz.field(
        default=None, doc="where the run's base model is now; where the run had it if None"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "reach", above=0, prefix="around.")
        check_range(self, "points", at_least=3, prefix="around.")
        check_range(self, "num_problems", at_least=1, prefix="around.")
        if len(self.genomes) > 2 or len(set(self.genomes)) < len(self.genomes):
            raise ConfigError(
                f"around.genomes must be one or two different ones, found {self.genomes}"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Landscape:
    """What was measured.

    Attributes:
        genomes: along which.
        multiples: of what they add, on each axis.
        rewards_P_G: problem by problem, of the grid's points; the first genome's axis is inner.
    """

    generation: int
    genomes: tuple[int, ...]
    multiples: list[float]
    rewards_P_G: NDArray[np.float64]

    @property
    def means_G(self) -> NDArray[np.float64]:
        """The mean over problems; lost rollouts are left out."""
        return np.nanmean(self.rewards_P_G, axis=0)

    @property
    def errors_G(self) -> NDArray[np.float64]:
        """1.96 standard errors of that over problems."""
        counts_G = np.maximum((~np.isnan(self.rewards_P_G)).sum(axis=0), 2)
        return 1.96 * np.nanstd(self.rewards_P_G, axis=0) / np.sqrt(counts_G)


def draw_landscape(
    log_path: str,
    around: Around,
    engine: EngineBuilder | None,
    output: Path,
    title: str,
    size: Size,
) -> list[Path]:
    """Measure, draw, and keep the numbers in a JSON file beside the plot.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
        KeyboardInterrupt: It was stopped; nothing is written.
    """
    run = RecordedRun(Path(log_path), around.model_name, around.trust)
    found: list[Landscape] = []

    async def measure() -> None:
        found.append(await measured(run, around, engine))

    if run_until_signal(measure):
        raise KeyboardInterrupt("interrupted; nothing was written")
    (landscape,) = found
    task = task_of_dataset(run.config.dataset)
    title = title or f"{task}, around the centre of generation {landscape.generation}"
    numbers = output.with_suffix(".json")
    replace_file(numbers, [_json(landscape).encode()])
    return [*_drawn(landscape, output, title, size), numbers]


async def measured(run: RecordedRun, around: Around, engine: EngineBuilder | None) -> Landscape:
    """Bring the run back, and attempt its problems everywhere on the grid.

    Raises:
        ConfigError: There is no such generation or genome, or no held-out problem.
    """
    generation = run.last_with_genomes if around.generation is None else around.generation
    numbers = around.genomes or _fittest(run, generation)
    chosen = [run.genome(generation, number) for number in numbers]
    for number, genome in zip(numbers, chosen, strict=True):
        if not genome.terms:
            raise ConfigError(
                f"around.genomes: genome {number} of generation {generation} is no sum of noise "
                "(it is the centre, or a point with coordinates of its own); take another"
            )
    if len(chosen) > 1 and len({tuple(term.seed for term in each.terms) for each in chosen}) == 1:
        raise ConfigError(
            f"around.genomes: {numbers[0]} and {numbers[1]} of generation {generation} are a "
            "mirrored pair, on one line with the centre; take genomes of two pairs"
        )
    rebuilt = await rebuild(run, engine)
    try:
        await rebuilt.go_to(run.centre_of(generation))
        side = np.linspace(-around.reach, around.reach, around.points).tolist()
        rewards_P_G = await _rewards(rebuilt, _grid(chosen, side), around.num_problems)
    finally:
        with anyio.CancelScope(shield=True):
            await rebuilt.close()
            end_idle_workers()
    return Landscape(generation, tuple(numbers), side, rewards_P_G)


def _fittest(run: RecordedRun, generation: int) -> tuple[int, ...]:
    """The genome of a generation that was the fittest; the first where that is not recorded."""
    run.check_generation(generation)
    if generation >= len(run.records):
        return (0,)
    fitness_G = run.records[generation].fitness_G
    return (max(range(len(fitness_G)), key=lambda g: (not math.isnan(f := fitness_G[g]), f)),)


def _grid(chosen: Sequence[Genome], side: Sequence[float]) -> list[Genome]:
    """A genome a point; along the first axis first."""
    along = [[_times(genome, m) for m in side] for genome in chosen]
    if len(along) == 1:
        return [Genome(terms) for terms in along[0]]
    return [Genome(first + second) for second in along[1] for first in along[0]]


def _times(genome: Genome, multiple: float) -> tuple[Term, ...]:
    return tuple(Term(term.seed, multiple * term.coefficient) for term in genome.terms)


async def _rewards(
    rebuilt: RebuiltRun, genomes_G: Sequence[Genome], num_problems: int
) -> NDArray[np.float64]:
    config, engine = rebuilt.run.config, rebuilt.engine
    problems_P = (await config.dataset(engine.tokenizer)).test_P[:num_problems]
    if not problems_P:
        raise ConfigError("log_path: the run holds out no problems, so there is none to attempt")
    sampler = PopulationSampler(
        engine,
        sampling=chz.replace(config.sampling, temperature=config.eval_temperature),
        rollout_timeout=config.rollout_timeout,
        turn_timeout=config.turn_timeout,
        max_failed_fraction=config.max_failed_fraction,
        run_seed=config.seed,
    )
    say(f"attempting {plural(len(problems_P), 'problem')} at {len(genomes_G)} points")
    groups_P = await sampler.rollout(rebuilt.generation, problems_P, genomes_G)
    return mean_rewards(groups_P)


def _drawn(landscape: Landscape, output: Path, title: str, size: Size) -> list[Path]:
    side, names = landscape.multiples, [f"genome {number}" for number in landscape.genomes]
    value = "mean held-out reward"
    if len(names) == 1:
        means, errors = landscape.means_G, landscape.errors_G
        line = Line(side, [means], (means - errors, means + errors))
        x_label = f"times what {names[0]} adds to the centre"
        return draw(output, {"": line}, title=title, x_label=x_label, y_label=value, size=size)
    values_Y_X = landscape.means_G.reshape(len(side), len(side))
    marked = {"centre": (0.0, 0.0), names[0]: (1.0, 0.0), names[1]: (0.0, 1.0)}
    return draw_map(
        output,
        Map(side, side, values_Y_X, marked),
        title=title,
        x_label=f"times what {names[0]} adds",
        y_label=f"times what {names[1]} adds",
        value_label=value,
        size=size,
    )


def _json(landscape: Landscape) -> str:
    def plain(values: NDArray[np.float64]) -> list[float | None]:
        return [value if math.isfinite(value) else None for value in values.tolist()]

    found = {
        "generation": landscape.generation,
        "genomes": list(landscape.genomes),
        "multiples": landscape.multiples,
        "rewards": plain(landscape.means_G),
        "intervals": plain(landscape.errors_G),
        "problems": len(landscape.rewards_P_G),
    }
    return json.dumps(found, indent=1) + "\n"
