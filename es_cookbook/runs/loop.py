"""The loop: ask, roll out, score, tell, apply, record.

A generation counts once its history line is on the disk. Whatever comes before that line (rollouts,
the step on the engine, metrics) is simply done again after a crash, and comes out the same. Where
`max_staleness` lets it, the next generation begins while the last rollouts of one end (`InOrder`).

The history is the checkpoint: base model and steps give the weights back bit for bit. `setup` says
what a run opens and closes, `recorder` what it writes.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from es_cookbook.engines.base import Engine
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.optimizers.base import Optimizer
from es_cookbook.population.sampler import PopulationSampler
from es_cookbook.population.scheduling import InOrder, Overlap
from es_cookbook.population.scoring import Asked, Scoring
from es_cookbook.rl.types import RLDataset, TrajectoryGroup
from es_cookbook.runs.config import Config
from es_cookbook.runs.history.format import Record
from es_cookbook.runs.history.store import check_fingerprint
from es_cookbook.runs.recorder import ANSWER, Recorder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run, open: what the loop works with.

    Attributes:
        start: the first generation that is still to come.
        held_back: the last that is recorded, if the first to come stands around the centre before
            its step, which the engine has not taken.
    """

    config: Config
    start: int
    held_back: Record | None
    dataset: RLDataset
    optimizer: Optimizer
    sampler: PopulationSampler
    scoring: Scoring
    engine: Engine
    recorder: Recorder

    async def train(self) -> None:
        optimizer, timed = self.optimizer, self.recorder.timed
        async with self._in_order() as attempts:
            for generation in itertools.takewhile(self._is_to_come, itertools.count(self.start)):
                genomes_G, asked, groups_P = await attempts.of(generation)
                with timed(generation, "score"):
                    scored = self.scoring.score(asked, groups_P)
                with timed(generation, "tell"):
                    step = optimizer.tell(
                        generation, genomes_G, scored.scores_P_G, scored.fitness_G
                    )
                results_P = self.dataset.results(generation, scored.batch_groups_P)
                self.dataset.tell(generation, results_P)
                if not self.dataset.depends_on_results:
                    results_P = results_P or self.scoring.results(asked, scored.batch_groups_P)
                self.scoring.tell(results_P)
                with timed(generation, "apply"):
                    fingerprint = await attempts.apply(step)
                await self.recorder.record(
                    generation, genomes_G, scored, results_P, step, fingerprint
                )

    def _is_to_come(self, generation: int) -> bool:
        """Whether the run, as long as it is by now, has this generation."""
        return generation < self.recorder.config.num_generations

    async def _attempt(
        self, generation: int, overlap: Overlap | None
    ) -> tuple[Sequence[Genome], Asked, Sequence[TrajectoryGroup]]:
        """A population attempts the problems of a generation."""
        timed = self.recorder.timed
        asked = await self._asked(generation)
        with timed(generation, "ask"):
            genomes_G = self.optimizer.ask(generation)
        with timed(generation, "rollout"):
            groups_P = await self.sampler.rollout(generation, asked.problems_P, genomes_G, overlap)
        self.recorder.rolled_out(generation, self.sampler.seconds)
        return genomes_G, asked, groups_P

    async def _asked(self, generation: int) -> Asked:
        """What the genomes of a generation attempt: its batch and the regularisers' problems.

        With a surrogate the centre attempts the batch here, and the genomes score answers.
        """
        batch_P, surrogate = self.dataset.get_batch(generation), self.config.surrogate
        if surrogate is None:
            return self.scoring.problems(generation, batch_P)
        sampling, attempts = surrogate.sampling(self.config.sampling), surrogate.attempts
        with self.recorder.timed(generation, ANSWER):
            answered_P = await self.sampler.rollout_centre(batch_P, sampling, attempts, generation)
            answers_P = [
                await surrogate.problem(asked, answered, self.engine.tokenizer)
                for asked, answered in zip(batch_P, answered_P, strict=True)
            ]
        return self.scoring.problems(generation, batch_P, answers_P, answered_P)

    def _in_order(self) -> InOrder[tuple[Sequence[Genome], Asked, Sequence[TrajectoryGroup]]]:
        """Attempts the generations to come; where `max_staleness` lets them they overlap."""
        return InOrder(
            self._attempt,
            self.engine,
            self.config.num_generations,
            self.config.centre_of if self.config.max_staleness else None,
            None if self.held_back is None else self._take_held_back,
        )

    async def _take_held_back(self) -> None:
        held = self.held_back
        assert held is not None
        found = await self.engine.apply(held.step)
        check_fingerprint(held.generation + 1, held.fingerprint, found, self.config.model_name)
