"""The loop: ask, roll out, score, tell, apply, record.

A generation counts once its history line is on the disk. Whatever comes before that line (rollouts,
the step on the engine, metrics) is simply done again after a crash, and comes out the same. Where
`max_staleness` lets it, the next generation begins while the last rollouts of one end (`ahead`).

The history is the checkpoint: base model and steps give the weights back bit for bit. `setup` says
what a run opens and closes, `recorder` what it writes.
"""

import functools
from pathlib import Path

from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.references import refuse_while_imported
from es_cookbook.common.terminal import as_program, command
from es_cookbook.population.ahead import Attempted
from es_cookbook.population.sampler import Overlap
from es_cookbook.runs.directory import HISTORY
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.result import Result, result_of
from es_cookbook.runs.trusted.scripts import trust_option
from es_cookbook.train.beginning import begun
from es_cookbook.train.config import Config
from es_cookbook.train.setup import Run, opened
from es_cookbook.train.stopping.signals import run_until_signal


async def main(config: Config) -> None:
    """Train, or go on training; a run that is complete is left as it is.

    Raises:
        ESCookbookError: Anything that the user can put right, in one sentence.
    """
    async with begun(config) as standing:
        if standing.is_complete:
            print(
                f"{config.log_path} is already complete, with {config.num_generations} "
                f"generations; for more: {_resuming(config)} num_generations=..."
            )
            return
        async with opened(config, standing) as run, run.in_order(_attempt) as attempts:
            for generation in run.generations:
                attempt = await attempts.of(generation)
                scores_P_G, fitness_G = run.scoring.score(attempt.groups_P)
                step = run.optimizer.tell(generation, attempt.genomes_G, scores_P_G, fitness_G)
                results_P = run.tell_dataset(generation)
                fingerprint = await attempts.apply(step)
                await run.recorder.record(
                    attempt, scores_P_G, fitness_G, results_P, step, fingerprint
                )


async def _attempt(run: Run, generation: int, overlap: Overlap | None) -> Attempted:
    """A population attempts the problems of a generation."""
    problems_P = await run.problems(generation)
    genomes_G = run.optimizer.ask(generation)
    groups_P = await run.sampler.rollout(generation, problems_P, genomes_G, overlap)
    return Attempted(generation, genomes_G, groups_P, run.sampler.seconds)


@as_program()
def run(config: Config) -> Result:
    """Run `main` as a program: Ctrl-C and SIGTERM stop it cleanly, ready to go on.

    Returns:
        Where the run is, and its first and last held-out metrics.

    Raises:
        KeyboardInterrupt: It was stopped; says how to go on.
        ESCookbookError: As `main`.
    """
    refuse_while_imported()
    try:
        interrupted = run_until_signal(functools.partial(main, config))
    except KeyboardInterrupt:
        interrupted = True
    except ESCookbookError as error:  # The sentence says it all; how it got here says nothing.
        raise error.with_traceback(None) from None
    if interrupted:
        recorded = sum(1 for _ in read_history(Path(config.log_path) / HISTORY))
        when = f"after generation {recorded}" if recorded else "before the first generation ended"
        raise KeyboardInterrupt(
            f"interrupted {when}; to go on, run the same command with "
            f"behavior_if_log_dir_exists=resume, or {_resuming(config)}"
        )
    return result_of(Path(config.log_path))


def _resuming(config: Config) -> str:
    """The whole command that goes on with a run."""
    trust = trust_option(Path(config.log_path), config_to_json(config))
    return f"{command('resume')} log_path={config.log_path}{trust}"
