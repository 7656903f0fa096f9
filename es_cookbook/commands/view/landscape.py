"""The reward around a centre: that of centre + m · (what a genome adds), over a grid of m.

A genome adds Σ coefficient · ε(seed): at m = 1 stands the genome itself, at -1 its mirror image, at
0 the centre. Along one genome this is a curve, along two a map. The run is brought back on its
engine as `play` and `evaluate` do; its held-out problems are attempted as an evaluation attempts
them, greedily by default, so the values differ by the weights and not by luck.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz
import numpy as np
from numpy.typing import NDArray

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.terminal import plural, say
from es_cookbook.engines.base import EngineBuilder
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.population.config import closing
from es_cookbook.rl.rollouts import mean_rewards
from es_cookbook.runs.files import replace_file
from es_cookbook.runs.report.naming import task_of_dataset
from es_cookbook.runs.report.plots import Line, Map, Size, draw, draw_map
from es_cookbook.train.recorded import RebuiltRun, RecordedRun, rebuild
from es_cookbook.train.stopping.signals import result_until_signal


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
    generation = run.last_with_genomes if around.generation is None else around.generation
    numbers = around.genomes or _fittest(run, generation)
    chosen = _chosen(run, generation, numbers)
    side: list[float] = np.linspace(-around.reach, around.reach, around.points).tolist()
    rewards_P_G = result_until_signal(
        partial(_rewards, run, engine, generation, _grid(chosen, side), around.num_problems),
        "interrupted; nothing was written",
    )
    counts_G = np.maximum((~np.isnan(rewards_P_G)).sum(axis=0), 2)
    means_G = np.nanmean(rewards_P_G, axis=0)  # Lost rollouts are left out.
    errors_G = 1.96 * np.nanstd(rewards_P_G, axis=0) / np.sqrt(counts_G)
    found = {
        "generation": generation,
        "genomes": list(numbers),
        "multiples": side,
        "rewards": _plain(means_G),
        "intervals": _plain(errors_G),
        "problems": len(rewards_P_G),
    }
    replace_file(output.with_suffix(".json"), [(json.dumps(found, indent=1) + "\n").encode()])
    task = task_of_dataset(run.config.dataset)
    title = title or f"{task}, around the centre of generation {generation}"
    value, names = "mean held-out reward", [f"genome {number}" for number in numbers]
    if len(names) == 1:
        line = Line(side, [means_G], (means_G - errors_G, means_G + errors_G))
        x_label = f"times what {names[0]} adds to the centre"
        drawn = draw(output, {"": line}, title=title, x_label=x_label, y_label=value, size=size)
    else:
        marked = {"centre": (0.0, 0.0), names[0]: (1.0, 0.0), names[1]: (0.0, 1.0)}
        drawn = draw_map(
            output,
            Map(side, side, means_G.reshape(len(side), len(side)), marked),
            title=title,
            x_label=f"times what {names[0]} adds",
            y_label=f"times what {names[1]} adds",
            value_label=value,
            size=size,
        )
    return [*drawn, output.with_suffix(".json")]


def _fittest(run: RecordedRun, generation: int) -> tuple[int, ...]:
    """The genome of a generation that was the fittest; the first where that is not recorded."""
    run.check_generation(generation)
    if generation >= len(run.records):
        return (0,)
    fitness_G = run.records[generation].fitness_G
    return (max(range(len(fitness_G)), key=lambda g: (not math.isnan(f := fitness_G[g]), f)),)


def _chosen(run: RecordedRun, generation: int, numbers: Sequence[int]) -> list[Genome]:
    """Genomes along which to go; refuses those along which there is nothing to see."""
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
    return chosen


def _grid(chosen: Sequence[Genome], side: Sequence[float]) -> list[Genome]:
    """A genome a point; along the first axis first."""
    along = [[_times(genome, m) for m in side] for genome in chosen]
    if len(along) == 1:
        return [Genome(terms) for terms in along[0]]
    return [Genome(first + second) for second in along[1] for first in along[0]]


def _times(genome: Genome, multiple: float) -> tuple[Term, ...]:
    return tuple(Term(term.seed, multiple * term.coefficient) for term in genome.terms)


async def _rewards(
    run: RecordedRun,
    engine: EngineBuilder | None,
    generation: int,
    genomes_G: Sequence[Genome],
    num_problems: int,
) -> NDArray[np.float64]:
    """Bring the run back, and attempt its problems everywhere on the grid."""
    rebuilt: RebuiltRun = await rebuild(run, engine)
    async with closing(rebuilt.engine):
        await rebuilt.go_to(run.centre_of(generation))
        config, tokenizer = run.config, rebuilt.engine.tokenizer
        problems_P = (await config.dataset(tokenizer)).test_P[:num_problems]
        if not problems_P:
            raise ConfigError("log_path: the run holds out no problems: there is none to attempt")
        say(f"attempting {plural(len(problems_P), 'problem')} at {len(genomes_G)} points")
        sampling = chz.replace(config.sampling, temperature=config.eval_temperature)
        sampler = config.sampler(rebuilt.engine, sampling=sampling)
        groups_P = await sampler.rollout(rebuilt.generation, problems_P, genomes_G)
        return mean_rewards(groups_P)


def _plain(values: NDArray[np.float64]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
