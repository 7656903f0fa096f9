"""How fast a population samples, against plain inference and against its own floor.

    python -m benchmarks.sampling

64 rank-1 genomes × 32 Countdown problems × 24 tokens, float32, the bundled model, greedy. The
model's end-of-sequence token is taken away, so that every request samples exactly 24 tokens for
everybody:

- transformers' `generate` on the unperturbed model, all 2,048 requests as one batch;
- the torch engine without perturbation (all requests go to the centre);
- the torch engine with the population resident;
- the same engine with one genome resident after the other (16 of the 64, to save time);
- `generate` and the population again for a random hybrid of 6 M parameters, which runs by its own
  forward;
- the floor: the matmuls of the linear layers alone, for as many token rows, on as many threads.
"""

import asyncio
import json
import shutil
import tempfile
import threading
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

from benchmarks.harness import interleaved, ratios, report, row
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.engines.torch.host import TorchEngine
from es_cookbook.evolution.genome import Genome, Term
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.types import EnvGroupBuilder, Observation, SamplingParams

GENOMES, PROBLEMS, TOKENS = 64, 32, 24
GENOMES_ONE_BY_ONE = 16
REPEATS = 5


def endless_model(directory: Path) -> Path:
    """The bundled model without end-of-sequence tokens."""
    shutil.copytree(BUNDLED_MODEL, directory, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            settings = json.loads(path.read_text())
            settings.pop("eos_token_id", None)
            settings.pop("eos_token", None)
            path.write_text(json.dumps(settings))
    return directory


class Floor:
    """The linear layers' matmuls alone, in chunks of `rows` token rows, one thread a core."""

    def __init__(self, model: torch.nn.Module, token_rows: int, rows: int = 512) -> None:
        self.threads = torch.get_num_threads()
        self.calls = token_rows // rows // self.threads
        linears = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
        self.pairs = [(torch.randn(rows, weight.shape[1]), weight) for weight in linears]

    def __call__(self) -> None:
        """Run them once."""
        threads = [threading.Thread(target=self._work) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for _ in range(self.calls):
                for x, weight in self.pairs:
                    torch.nn.functional.linear(x, weight)


async def sample(
    engine: TorchEngine, targets: list[int | str], prompts: list[tuple[int, ...]]
) -> None:
    """Every target samples `TOKENS` tokens for every prompt."""
    params = SamplingParams(max_tokens=TOKENS)
    actions = await asyncio.gather(
        *(
            engine.sample(SampleRequest(target, Observation(prompt, is_last=True), params))
            for target in targets
            for prompt in prompts
        )
    )
    assert all(len(action.tokens_T) == TOKENS for action in actions)


async def first_prompt(builder: EnvGroupBuilder) -> tuple[int, ...]:
    """The prompt of a problem's first turn."""
    group = await builder.make_envs(1)
    observation = await group.envs[0].initial_observation()
    await group.close()
    return observation.tokens_T


class Contest:
    """A model in transformers and in the torch engine, and the same requests for both."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        self.loop = loop
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        builder = TorchEngineBuilder()
        self.engine = loop.run_until_complete(
            builder(model_name=path, search_space=LowRank(rank=1))
        )
        problems = CountdownDatasetBuilder(problems_per_generation=PROBLEMS)(tokenizer)
        batch = loop.run_until_complete(problems).train.get_batch(0)
        self.prompts = [loop.run_until_complete(first_prompt(problem)) for problem in batch]
        self.genomes = [Genome((Term(1 + g // 2, 0.005 * (-1) ** g),)) for g in range(GENOMES)]
        self._pad = tokenizer.pad_token_id
        self._longest = max(map(len, self.prompts))
        pads = [self._longest - len(p) for p in self.prompts]
        rows = list(zip(pads, self.prompts, strict=True)) * GENOMES
        self._input_ids = torch.tensor([[self._pad] * n + list(p) for n, p in rows])
        self._mask = torch.tensor([[0] * n + [1] * len(p) for n, p in rows])

    def generate(self) -> None:
        """All requests as one batch of the unperturbed model, by transformers."""
        with torch.inference_mode():
            out = self.model.generate(
                self._input_ids,
                attention_mask=self._mask,
                max_new_tokens=TOKENS,
                do_sample=False,
                pad_token_id=self._pad,
            )
        assert out.shape == (GENOMES * PROBLEMS, self._longest + TOKENS)

    def answer(self, resident: list[Genome], targets: list[int | str]) -> None:
        """Load genomes, and let targets sample for every prompt."""
        self.loop.run_until_complete(self.engine.load(resident))
        self.loop.run_until_complete(sample(self.engine, targets, self.prompts))

    def population(self) -> None:
        """The same requests, of every genome."""
        self.answer(self.genomes, list(range(GENOMES)))


def hybrid_model(directory: Path) -> Path:
    """A random model of convolutions and attention, 6 M parameters, with the bundled tokenizer."""
    endless_model(directory)
    vocabulary = len(AutoTokenizer.from_pretrained(directory))
    config = Lfm2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=1024,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=6,
        layer_types=["conv", "full_attention"] * 3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Lfm2ForCausalLM(config).save_pretrained(directory)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = directory / name  # where nothing is said, the class has a token of its own
        nothing = {"eos_token_id": None, "eos_token": None}
        path.write_text(json.dumps(json.loads(path.read_text()) | nothing))
    return directory


def main() -> None:
    """Measure and report."""
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as directory:
        contest = Contest(loop, str(endless_model(Path(directory))))
    with tempfile.TemporaryDirectory() as directory:
        hybrid = Contest(loop, str(hybrid_model(Path(directory))))

    def one_by_one() -> None:
        for genome in contest.genomes[:GENOMES_ONE_BY_ONE]:
            contest.answer([genome], [0])

    prompt_length = sum(map(len, contest.prompts)) // PROBLEMS
    token_rows = GENOMES * PROBLEMS * (prompt_length + TOKENS - 1)
    times = interleaved(
        {
            "generate": contest.generate,
            "centre": lambda: contest.answer([], ["centre"] * GENOMES),
            "population": contest.population,
            "one_by_one": one_by_one,
            "floor": Floor(contest.model, token_rows),
        },
        repeats=REPEATS,
    )
    times |= interleaved(
        {"hybrid_generate": hybrid.generate, "hybrid": hybrid.population}, repeats=REPEATS
    )
    for each in (contest, hybrid):
        loop.run_until_complete(each.engine.close())
    loop.close()

    def rate(name: str) -> list[float]:
        genomes_run = GENOMES_ONE_BY_ONE if name == "one_by_one" else GENOMES
        return [genomes_run * PROBLEMS * TOKENS / seconds for seconds in times[name]]

    ours = rate("population")
    report(
        "sampling",
        [
            row("transformers generate, unperturbed", rate("generate"), "tokens/s"),
            row("engine, unperturbed", rate("centre"), "tokens/s"),
            row("engine, 64 rank-1 genomes, loading included", rate("population"), "tokens/s"),
            row("engine, one genome after the other", rate("one_by_one"), "tokens/s"),
            row("floor: the linear layers' matmuls alone", rate("floor"), "tokens/s"),
            row("population / generate", ratios(ours, rate("generate")), "x", at_least=1.5),
            row("population / unperturbed", ratios(ours, rate("centre")), "x", at_least=0.8),
            row("population / one by one", ratios(ours, rate("one_by_one")), "x", at_least=4),
            row(
                "hybrid (its own forward): population / generate",
                ratios(rate("hybrid"), rate("hybrid_generate")),
                "x",
                at_least=0.7,
            ),
            row("share of the floor reached", ratios(ours, rate("floor")), "x"),
        ],
    )


if __name__ == "__main__":
    main()
