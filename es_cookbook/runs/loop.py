"""The loop: ask, roll out, score, tell, apply, record.

A generation counts once its history line is on the disk. Everything before that line (rollouts, the
step on the engine, metrics) is repeated after a crash, with the same result.

The history is the checkpoint: base model and steps give the weights back bit for bit. `setup` and
`evolution_run` open and close a run, `recorder` writes its files.
"""

import dataclasses
from collections.abc import Sequence

import chz

from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Genome, Step
from es_cookbook.evolution.optimizers.base import Optimizer, tied_fraction
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.population.scheduling import InOrder, Overlap
from es_cookbook.population.scoring import Asked, Scored, Scoring
from es_cookbook.rl.types import ProblemResult, RLDataset, TrajectoryGroup
from es_cookbook.runs.config import Config
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.history.store import HistoryStore, check_fingerprint
from es_cookbook.runs.recorder import Recorder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """An open run.

    Attributes:
        generations: remaining ones.
        held_back: the last recorded generation, if the engine has not taken its step because the
            genomes of the next one are around the centre before it.
    """

    config: Config
    generations: range
    held_back: Record | None
    dataset: RLDataset
    optimizer: Optimizer
    sampler: PopulationSampler
    scoring: Scoring
    engine: Engine
    history: HistoryStore
    recorder: Recorder

    async def problems(self, generation: int) -> Asked:
        """Return the problems of a generation: its batch and those of the regularisers.

        With a surrogate the centre attempts the batch here, and the genomes score answers.
        """
        batch_P, surrogate = self.dataset.get_batch(generation), self.config.surrogate
        if surrogate is None:
            return self.scoring.problems(generation, batch_P)
        sampling = chz.replace(surrogate.sampling(self.config.sampling), logprobs=True)
        attempts = surrogate.attempts
        with self.recorder.timed(generation, "answer"):
            answered_P = await self.sampler.rollout_centre(batch_P, sampling, attempts, generation)
            answers_P = [
                await surrogate.problem(asked, answered, self.engine.tokenizer)
                for asked, answered in zip(batch_P, answered_P, strict=True)
            ]
        return self.scoring.problems(generation, batch_P, answers_P, answered_P)

    def ask(self, generation: int) -> Sequence[Genome]:
        """Return the population of a generation."""
        with self.recorder.timed(generation, "ask"):
            return self.optimizer.ask(generation)

    async def rollout(
        self,
        generation: int,
        asked: Asked,
        genomes_G: Sequence[Genome],
        overlap: Overlap | None = None,
    ) -> Sequence[TrajectoryGroup]:
        """Run the population's attempts at the problems; returns one group per problem."""
        with self.recorder.timed(generation, "rollout"):
            groups_P = await self.sampler.rollout(generation, asked.problems_P, genomes_G, overlap)
        self.recorder.rolled_out(generation, self.sampler.seconds)
        return groups_P

    def score(self, generation: int, asked: Asked, groups_P: Sequence[TrajectoryGroup]) -> Scored:
        """Compute `scores_P_G` and `fitness_G`, with NaN for lost rollouts."""
        with self.recorder.timed(generation, "fitness"):
            return self.scoring.score(asked, groups_P)

    def tell(self, generation: int, genomes_G: Sequence[Genome], scored: Scored) -> Step:
        """Return the optimizer's step for these scores."""
        with self.recorder.timed(generation, "tell"):
            return self.optimizer.tell(generation, genomes_G, scored.scores_P_G, scored.fitness_G)

    async def record(
        self,
        generation: int,
        asked: Asked,
        genomes_G: Sequence[Genome],
        scored: Scored,
        step: Step,
        fingerprint: int,
    ) -> None:
        """Record a generation and the fingerprint of the centre after it; begin the next one."""
        optimizer, centre = self.optimizer, self.config.centre_of(generation)
        sigma, rate = optimizer.sigma(generation), optimizer.learning_rate(generation)
        metrics = {
            **scored.metrics,
            **optimizer.metrics(),
            "optimizer/sigma": sigma,
            **({} if rate is None else {"optimizer/learning_rate": rate}),
            "genomes/tied_fraction": tied_fraction(genomes_G, scored.fitness_G),
            "step/rms_over_sigma": step.rms / sigma,
        }
        scores_P_G = tuple(map(tuple, scored.scores_P_G.tolist()))
        record = Record(
            generation=generation,
            step=step,
            fitness_G=tuple(scored.fitness_G.tolist()),
            fingerprint=fingerprint,
            scores_P_G=scores_P_G if optimizer.records_scores else None,
            results_P=tuple(self._told(generation, asked, scored)),
            centre=None if centre == generation else centre,
        )

        async def keep() -> None:
            self.history.append(record)

        self.recorder.progress.moved(step)
        await self.recorder.record(generation, scored.groups_P, metrics, keep)

    def _told(self, generation: int, asked: Asked, scored: Scored) -> Sequence[ProblemResult]:
        """Pass the results of the problems to data set and objective; returns those to record."""
        results_P = self.dataset.results(generation, scored.batch_groups_P)
        self.dataset.tell(generation, results_P)
        if not self.dataset.depends_on_results:
            results_P = results_P or self.scoring.results(asked, scored.batch_groups_P)
        self.scoring.tell(results_P)
        return results_P


async def train_in_turn(run: Run) -> None:
    """Train the remaining generations one after the other."""
    for generation in run.generations:
        asked = await run.problems(generation)
        genomes_G = run.ask(generation)
        groups_P = await run.rollout(generation, asked, genomes_G)
        scored = run.score(generation, asked, groups_P)
        step = run.tell(generation, genomes_G, scored)
        with run.recorder.timed(generation, "apply"):
            fingerprint = await run.engine.apply(step)
        await run.record(generation, asked, genomes_G, scored, step, fingerprint)


async def train_overlapping(run: Run) -> None:
    """Train, starting each generation while the last rollouts of the one before end."""

    async def attempt(
        generation: int, overlap: Overlap
    ) -> tuple[Asked, Sequence[Genome], Sequence[TrajectoryGroup]]:
        asked = await run.problems(generation)
        genomes_G = run.ask(generation)
        return asked, genomes_G, await run.rollout(generation, asked, genomes_G, overlap)

    config, held = run.config, run.held_back
    length, centre_of = config.num_generations, config.centre_of
    async with InOrder(attempt, run.engine, length, centre_of) as attempts:
        if held is not None:
            attempts.begin(run.generations.start)
            found = await attempts.apply(held.step)
            check_fingerprint(held.generation + 1, held.fingerprint, found, config.model_name)
        for generation in run.generations:
            asked, genomes_G, groups_P = await attempts.result(generation)
            scored = run.score(generation, asked, groups_P)
            step = run.tell(generation, genomes_G, scored)
            with run.recorder.timed(generation, "apply"):
                fingerprint = await attempts.apply(step)
            await run.record(generation, asked, genomes_G, scored, step, fingerprint)
