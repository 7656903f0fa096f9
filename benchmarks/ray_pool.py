"""The cost of a Ray pool beside the same engine in this process, and the bytes that it sends.

    python -m benchmarks.ray_pool

Single-turn Countdown through the sampler: 64 rank-1 genomes × 32 problems × 24 tokens, float32, the
bundled model without its end-of-sequence token. By turns: the torch engine in this process with a
lane a core; a pool of one such engine, which shows what crossing to another process costs; a pool
of two with half of the cores each. All give the same actions.
"""

import asyncio
import importlib.util
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import interleaved, mirrored_pairs, ratios, report, row
from benchmarks.sampling import GENOMES, PROBLEMS, TOKENS, endless_model
from es_cookbook.common.machine.cores import num_cores
from es_cookbook.engines.base import Engine
from es_cookbook.engines.ray.pool import RayPool, RayPoolBuilder
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Genome, Step, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import PopulationSampler, rare_garbage_collection
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.types import RLDataset, SamplingParams, TrajectoryGroup

REPEATS = 9
_BIG = 1 << 62
"""Added to seeds: those of a run have 63 bits, and a small number takes fewer bytes."""
GENOMES_G = [
    Genome(tuple(Term(_BIG + term.seed, term.coefficient) for term in genome.terms))
    for genome in mirrored_pairs(GENOMES)
]
STEP = Step(tuple(Term(_BIG + s, 0.01) for s in range(1, 1 + GENOMES // 2)))


class Rollouts:
    """The same generation, again and again."""

    def __init__(self, engine: Engine, dataset: RLDataset) -> None:
        self.sampler = PopulationSampler(engine, sampling=SamplingParams(max_tokens=TOKENS))
        self.dataset = dataset
        self.groups_P: list[TrajectoryGroup] = []

    async def run(self) -> None:
        """Run one generation."""
        batch = self.dataset.get_batch(0)
        self.groups_P = await self.sampler.rollout(0, batch, GENOMES_G)


async def bytes_a_genome(rollouts: Rollouts, pool: RayPool) -> tuple[float, float]:
    """Return bytes sent per genome and generation, without questions; and those of questions."""
    before = pool.stats()
    await rollouts.run()
    await pool.apply(STEP)
    sent, questions = (pool.stats()[key] - before[key] for key in ("sent_bytes", "question_bytes"))
    await pool.restore([])
    return (sent - questions) / GENOMES, questions / GENOMES


def main() -> None:
    """Measure and report."""
    if importlib.util.find_spec("ray") is None:
        sys.exit("benchmarks.ray_pool needs Ray: pip install 'ray>=2.50'")
    loop = asyncio.new_event_loop()
    run = loop.run_until_complete
    with tempfile.TemporaryDirectory() as directory:
        where = {
            "model_name": str(endless_model(Path(directory))),
            "search_space": LowRank(rank=1),
        }
        cores = num_cores()
        engine = run(TorchEngineBuilder(num_lanes=cores)(**where))
        one = run(RayPoolBuilder(num_engines=1, num_cpus=cores)(**where))
        two = run(RayPoolBuilder(num_engines=2, num_cpus=cores / 2)(**where))
        dataset = run(CountdownDatasetBuilder(problems_per_generation=PROBLEMS)(engine.tokenizer))
        here, in_one, in_two = (Rollouts(e, dataset.train) for e in (engine, one, two))
        with rare_garbage_collection():
            times = interleaved(
                {
                    "here": lambda: run(here.run()),
                    "one": lambda: run(in_one.run()),
                    "two": lambda: run(in_two.run()),
                },
                repeats=REPEATS,
                warmups=2,
            )
        assert here.groups_P == in_one.groups_P == in_two.groups_P
        sent, questions = run(bytes_a_genome(in_two, two))
        for each in (engine, one, two):
            run(each.close())
    loop.close()
    tokens = GENOMES * PROBLEMS * TOKENS
    report(
        "ray_pool",
        [
            row("in this process", [tokens / s for s in times["here"]], "tokens/s"),
            row("pool of one", [tokens / s for s in times["one"]], "tokens/s"),
            row("pool of two", [tokens / s for s in times["two"]], "tokens/s"),
            row("time: one / this process", ratios(times["one"], times["here"]), "x", at_most=1.1),
            row("time: two / this process", ratios(times["two"], times["here"]), "x", at_most=1.1),
            row("two engines: sent a genome and generation", [sent], "bytes", at_most=64),
            row("two engines: questions, a genome and generation", [questions], "bytes"),
        ],
    )


if __name__ == "__main__":
    main()
