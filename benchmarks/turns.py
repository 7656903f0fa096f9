"""How fast a population samples rollouts of many turns.

    python -m benchmarks.turns
    python -m benchmarks.turns --genomes 16 --repeats 3

64 rank-1 genomes × 16 Countdown problems × 8 turns, float32, the bundled model without its
end-of-sequence token. In each turn the model writes 16 tokens, greedily, and is told 32 more, which
is how agents use tools: a short call, a longer result. A turn's prompt is all that was said before.

- turns: later turns go on from the keys and values of earlier ones;
- anew: the same engine without them (`engine.prefix_cache_gib=0`) prefills every prompt whole;
- single: one turn of the same tokens: all results are in the prompt, and the model writes
  all 128 at once.

All three are run by turns in one process, once with the answers compared: with kept keys and values
and without they are the same. Ratios are of the processor's time, which other work on the machine
changes little, and of the clock's.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.harness import interleaved, mirrored_pairs, ratios, report, row, share_cached
from benchmarks.sampling import endless_model, first_prompt
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.rl.types import Observation, SamplingParams

PROBLEMS, TURNS, WRITTEN, TOLD = 16, 8, 16, 32


class Population:
    """An engine, and the rollouts that its genomes run."""

    def __init__(
        self, path: str, num_genomes: int, turns: int = TURNS, prefix_cache_gib: float | None = None
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.turns = turns
        self.genomes = mirrored_pairs(num_genomes)
        self.processor_seconds: list[float] = []
        self.answers: list[list[tuple[int, ...]]] = []
        builder = TorchEngineBuilder(prefix_cache_gib=prefix_cache_gib)
        self.engine: TorchEngine = self.loop.run_until_complete(
            builder(model_name=path, search_space=LowRank(rank=1))
        )
        problems = CountdownDatasetBuilder(problems_per_generation=PROBLEMS)
        tokenizer = AutoTokenizer.from_pretrained(path)
        batch = self.loop.run_until_complete(problems(tokenizer)).train.get_batch(0)
        self.prompts = [self.loop.run_until_complete(first_prompt(problem)) for problem in batch]

    def __call__(self) -> None:
        """Load the genomes, and run all rollouts."""
        started = time.process_time()
        self.loop.run_until_complete(self.engine.load(self.genomes))
        self.answers = self.loop.run_until_complete(self._rollouts())
        self.processor_seconds.append(time.process_time() - started)

    async def _rollouts(self) -> list[list[tuple[int, ...]]]:
        genomes = range(len(self.genomes))
        return await asyncio.gather(*(self._rollout(g, p) for g in genomes for p in self.prompts))

    async def _rollout(self, genome: int, prompt: tuple[int, ...]) -> list[tuple[int, ...]]:
        params = SamplingParams(max_tokens=TURNS * WRITTEN // self.turns)
        told = (prompt * TOLD)[:TOLD]
        prompt += told * (TURNS - self.turns)
        actions: list[tuple[int, ...]] = []
        for turn in range(self.turns):
            observation = Observation(prompt, is_last=turn + 1 == self.turns)
            action = await self.engine.sample(SampleRequest(genome, observation, params))
            actions.append(action.tokens_T)
            prompt += action.tokens_T + told
        return actions

    def close(self) -> None:
        """Close the engine."""
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--genomes", type=int, default=64, help="genomes of the population")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each that are counted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = str(endless_model(Path(directory)))
        populations = {
            "turns": Population(path, options.genomes),
            "anew": Population(path, options.genomes, prefix_cache_gib=0.0),
            "single": Population(path, options.genomes, turns=1),
        }
    clock = interleaved(populations, repeats=options.repeats)
    processor = {name: p.processor_seconds[-options.repeats :] for name, p in populations.items()}
    assert populations["turns"].answers == populations["anew"].answers
    stats = populations["turns"].engine.stats()
    for population in populations.values():
        population.close()
    sampled = options.genomes * PROBLEMS * TURNS * WRITTEN
    cached = share_cached(stats)
    rows = [
        row(f"{name}, by the clock", [sampled / seconds for seconds in clock[name]], "tokens/s")
        for name in populations
    ]
    for by, seconds in (("processor time", processor), ("the clock", clock)):
        rows += [
            row(
                f"turns / anew, by {by}", ratios(seconds["anew"], seconds["turns"]), "x", at_least=3
            ),
            row(
                f"turns / single, by {by}",
                ratios(seconds["single"], seconds["turns"]),
                "x",
                at_least=0.7,
            ),
        ]
    report("turns", [*rows, row("prompt tokens that were not prefilled", [100 * cached], "%")])


if __name__ == "__main__":
    main()
