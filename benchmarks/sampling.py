"""Sampling speed of a population, against plain inference and the machine's limits.

    python -m benchmarks.sampling           # the bundled model, and the hybrid
    python -m benchmarks.sampling large     # 20 million parameters, and half a billion

Rank-1 genomes answer Countdown problems, greedy. The end-of-sequence token is taken away, so that
every request samples the same number of tokens for everybody. Models: the bundled one, in float32
and in bfloat16; random ones of 20 M parameters (float32) and of Qwen2.5-0.5B's shape (bfloat16; few
tokens, to save time); and a random hybrid of 6 M, which runs by its own forward. Each is sampled by

- transformers' `generate` on the unperturbed model, all requests as one batch, in the same dtype;
- the torch engine without perturbation (all genomes are the centre, and share what others do);
- the torch engine with the population resident;
- the bundled model also with one genome resident after the other (16 of the 64, to save time).

The floor is what must be done at the least, on as many threads: the products of all linear layers
for as many rows as have to be run, prompts together and sampled tokens a step at a time, what the
prompts of a genome begin with in common once, the output head's for sampled tokens alone, by the
fastest kernel of that dtype that torch has here (MKL or oneDNN, with weights as they are or packed,
each reported); and the keys and values that decoding reads, at the bandwidth at which memory is
copied.
Nothing is counted for norms, activations, sampling and Python.

Tokens per second are by the clock. Ratios are of processor time, so that other programs on the
machine do not decide: where all cores are busy throughout it is the clock's, and `generate`, which
often keeps one core waiting, is not charged for that.

vLLM beside all of this: `benchmarks.engines`.
"""

import asyncio
import dataclasses
import functools
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.harness import Row, interleaved, mirrored_pairs, ratios, report, row
from es_cookbook.engines.base import SampleRequest
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.evolution.genome import Genome
from es_cookbook.evolution.spaces.low_rank import LowRank
from es_cookbook.population.sampler import rare_garbage_collection
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL
from es_cookbook.rl.types import EnvGroupBuilder, Observation, SamplingParams

if TYPE_CHECKING:  # its kernels are nothing that vLLM wants to find in `benchmarks.engines`
    from es_cookbook.engines.torch.host import TorchEngine

GENOMES, PROBLEMS, TOKENS = 64, 32, 24
GENOMES_ONE_BY_ONE = 16
REPEATS = 9
_ROWS = 1024
"""Most rows of a product of the floor: more are no faster."""
COPIED = 1 << 26
"""Numbers that a thread copies to measure bandwidth, far more than any cache holds."""


def _countdown_prompts(tokenizer: PreTrainedTokenizerBase, problems: int) -> list[tuple[int, ...]]:
    """Return first turns of Countdown problems."""

    async def make() -> list[tuple[int, ...]]:
        dataset = await CountdownDatasetBuilder(problems_per_generation=problems)(tokenizer)
        return [await first_prompt(problem) for problem in dataset.train.get_batch(0)]

    return asyncio.run(make())


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its requests, and what is expected of it.

    Attributes:
        make: writes the model to a directory.
        prompts: so many problems' prompts by a tokenizer, of Countdown unless said otherwise.
        generate: `population / generate` at least; `share`, of the floor.
    """

    name: str
    make: Callable[[Path], Path]
    dtype: str
    genomes: int = GENOMES
    problems: int = PROBLEMS
    tokens: int = TOKENS
    repeats: int = REPEATS
    generate: float | None = None
    unperturbed: float | None = None
    share: float | None = None
    prompts: Callable[[PreTrainedTokenizerBase, int], list[tuple[int, ...]]] = _countdown_prompts
    products: Literal["auto", "int8"] = "auto"


def endless_model(directory: Path, source: str | Path = BUNDLED_MODEL) -> Path:
    """Write a model, the bundled one if none is named, without end-of-sequence tokens."""
    if source != directory:
        shutil.copytree(source, directory, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = directory / name
        if path.exists():
            # If unset, a class may have a default token.
            nothing = {"eos_token_id": None, "eos_token": None}
            path.write_text(json.dumps(json.loads(path.read_text()) | nothing))
    return directory


def save_random(
    directory: Path,
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random model with the bundled tokenizer, without end-of-sequence tokens."""
    shutil.copytree(BUNDLED_MODEL, directory, dirs_exist_ok=True)
    torch.manual_seed(0)
    with torch.device("cpu"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            kind(config).save_pretrained(directory)
        finally:
            torch.set_default_dtype(before)
    return endless_model(directory, directory)


def hybrid_model(directory: Path) -> Path:
    """Write a random model of convolutions and attention, 6 M parameters."""
    endless_model(directory)
    config = Lfm2Config(
        vocab_size=len(AutoTokenizer.from_pretrained(directory)),
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
    return save_random(directory, Lfm2ForCausalLM, config)


def model_of_20m(directory: Path) -> Path:
    """Write a random Qwen2 of 20 M parameters."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return save_random(directory, Qwen2ForCausalLM, config)


def model_of_half_a_billion(directory: Path) -> Path:
    """Write a random model of Qwen2.5-0.5B's shape, in bfloat16."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return save_random(directory, Qwen2ForCausalLM, config, torch.bfloat16)


CASES = (
    Case("bundled", endless_model, "float32", generate=2.5, unperturbed=0.95, share=0.4),
    Case("bundled, bfloat16", endless_model, "bfloat16", generate=3, unperturbed=0.95, share=0.4),
    Case("20 M", model_of_20m, "float32", tokens=8, genomes=16, repeats=3, share=0.6),
    Case(
        "0.5 B, bfloat16",
        model_of_half_a_billion,
        "bfloat16",
        genomes=8,
        problems=8,
        tokens=6,
        repeats=3,
        share=0.85,
    ),
)
HYBRID = Case("hybrid (its own forward)", hybrid_model, "float32", generate=0.7)


def _heights(rows: int) -> list[int]:
    """Return rows in runs of at most `_ROWS`."""
    return [min(_ROWS, rows - first) for first in range(0, rows, _ROWS)]


def _multiplications(chunks: list[tuple[torch.Tensor, list[int]]]) -> int:
    return sum(weight.numel() * sum(heights) for weight, heights in chunks)


class Floor:
    """The products of linear layers by several kernels, and reading a cache, one thread a core.

    Of the products one in `every` is run, to save time; `times` is how many times as many there
    are. Layers are alike, and all weights together are many times what a cache holds.
    """

    def __init__(self, contest: "Contest", every: int = 1) -> None:
        self.threads = torch.get_num_threads()
        case, model = contest.case, contest.model
        requests = case.genomes * case.problems // self.threads
        beginnings = {p[:n] for p in contest.prompts for n in range(1, len(p) + 1)}
        prompts = len(beginnings) * case.genomes // self.threads
        head = model.get_output_embeddings()
        assert isinstance(head, torch.nn.Linear)
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        step = _heights(requests)
        of_layer = _heights(prompts) + step * (case.tokens - 1)
        # Each weight, and the heights of its products on each thread.
        of_layers = [(layer.weight.detach(), of_layer) for layer in layers]
        of_head = step * case.tokens
        self._chunks = [*of_layers[::every], (head.weight.detach(), of_head[::every])]
        whole = [*of_layers, (head.weight.detach(), of_head)]
        self.times = _multiplications(whole) / _multiplications(self._chunks)
        text = model.config.get_text_config()
        of_token = 2 * text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
        of_token *= text.num_hidden_layers * model.dtype.itemsize
        positions = sum(
            len(prompt) + step + 1 for prompt in contest.prompts for step in range(case.tokens - 1)
        )
        self._cache_bytes = of_token * positions * case.genomes

    @functools.cached_property
    def _buffers(self) -> list[torch.Tensor]:
        return [torch.ones(2, COPIED // 2) for _ in range(self.threads)]

    def kernels(self) -> dict[str, Callable[[], None]]:
        """Return the kernels for the model's dtype, as functions that run all products."""
        dtype = self._chunks[0][0].dtype
        plain = "MKL" if dtype == torch.float32 else "oneDNN"
        linear = torch.nn.functional.linear
        found = {plain: [(weight, linear) for weight, _ in self._chunks]}
        try:
            ops = torch.ops.mkldnn
            reordered = [ops._reorder_linear_weight(weight) for weight, _ in self._chunks]
            found["oneDNN packed"] = [
                (weight, lambda x, w: ops._linear_pointwise(x, w, None, "none", [], ""))
                for weight in reordered
            ]
            torch.ops.mkldnn._linear_pointwise(
                torch.ones(2, self._chunks[0][0].shape[1], dtype=dtype),
                reordered[0],
                None,
                "none",
                [],
                "",
            )
        except (RuntimeError, AttributeError):
            found.pop("oneDNN packed", None)
        return {name: self._on_all(products, dtype) for name, products in found.items()}

    def by(self, product: Callable[..., torch.Tensor], dtype: torch.dtype) -> Callable[[], None]:
        """Run all products of rows of this dtype by a kernel that takes the weights as they are."""
        return self._on_all([(weight, product) for weight, _ in self._chunks], dtype)

    def _on_all(
        self, products: list[tuple[torch.Tensor, Callable[..., torch.Tensor]]], dtype: torch.dtype
    ) -> Callable[[], None]:
        inputs = {w.shape[1]: torch.randn(_ROWS, w.shape[1]).to(dtype) for w, _ in self._chunks}

        def work() -> None:
            for (weight, product), (plain, heights) in zip(products, self._chunks, strict=True):
                for height in heights:
                    product(inputs[plain.shape[1]][:height], weight)

        return lambda: self._in_threads(work)

    def read(self) -> None:
        """Move as many bytes as decoding reads of keys and values, half of them by writing."""
        share = self._cache_bytes / 2 / 4 / self.threads
        own = list(self._buffers)

        def work() -> None:
            source, target = own.pop()
            left = int(share)
            while left > 0:
                size = min(left, len(source))
                target[:size].copy_(source[:size])
                left -= size

        self._in_threads(work)

    def _in_threads(self, work: Callable[[], None]) -> None:
        def alone() -> None:
            torch.set_num_threads(1)
            with torch.inference_mode():
                work()

        threads = [threading.Thread(target=alone) for _ in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def sample(
    engine: "TorchEngine", targets: list[int | str], prompts: list[tuple[int, ...]], tokens: int
) -> None:
    """Sample so many tokens of every target for every prompt."""
    params = SamplingParams(max_tokens=tokens)
    actions = await asyncio.gather(
        *(
            engine.sample(SampleRequest(target, Observation(prompt, is_last=True), params))
            for target in targets
            for prompt in prompts
        )
    )
    assert all(len(action.tokens_T) == tokens for action in actions)


async def first_prompt(builder: EnvGroupBuilder) -> tuple[int, ...]:
    """Return the prompt of a problem's first turn."""
    group = await builder.make_envs(1)
    observation = await group.envs[0].initial_observation()
    await group.close()
    return observation.tokens_T


class Contest:
    """A model in transformers and in the torch engine, and the same requests for both."""

    def __init__(self, loop: asyncio.AbstractEventLoop, case: Case) -> None:
        self.loop = loop
        with tempfile.TemporaryDirectory() as directory:
            path = str(case.make(Path(directory)))
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=case.dtype).eval()
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            builder = TorchEngineBuilder(dtype=case.dtype, products=case.products)
            self.engine = loop.run_until_complete(
                builder(model_name=path, search_space=LowRank(rank=1))
            )
        self.ask(case)

    def ask(self, case: Case) -> None:
        """Make the requests of a case of the same model."""
        self.case = case
        self.prompts = case.prompts(self._tokenizer, case.problems)
        self.genomes = mirrored_pairs(case.genomes)
        self._pad = self._tokenizer.pad_token_id
        self._longest = max(map(len, self.prompts))
        pads = [self._longest - len(p) for p in self.prompts]
        rows = list(zip(pads, self.prompts, strict=True)) * case.genomes
        self._input_ids = torch.tensor([[self._pad] * n + list(p) for n, p in rows])
        self._mask = torch.tensor([[0] * n + [1] * len(p) for n, p in rows])

    def generate(self, genomes: int | None = None) -> None:
        """Answer all requests, or so many genomes', as one batch of the unperturbed model."""
        rows = (genomes or self.case.genomes) * self.case.problems
        with torch.inference_mode():
            out = self.model.generate(
                self._input_ids[:rows],
                attention_mask=self._mask[:rows],
                max_new_tokens=self.case.tokens,
                do_sample=False,
                pad_token_id=self._pad,
            )
        assert out.shape == (rows, self._longest + self.case.tokens)

    def answer(self, resident: list[Genome], targets: list[int | str]) -> None:
        """Load genomes, and let targets sample for every prompt."""
        self.loop.run_until_complete(self.engine.load(resident))
        self.loop.run_until_complete(sample(self.engine, targets, self.prompts, self.case.tokens))

    def unperturbed(self) -> None:
        """Answer the same requests, of as many genomes that are the centre, and share as much."""
        self.answer([Genome()] * self.case.genomes, list(range(self.case.genomes)))

    def population(self) -> None:
        """Answer the same requests, of every genome."""
        self.answer(self.genomes, list(range(self.case.genomes)))

    def one_genome(self) -> None:
        """Answer the requests of the first genome."""
        self.answer(self.genomes[:1], [0])

    def answer_as_centre(self, prompts: list[tuple[int, ...]]) -> None:
        """Let the centre sample for some prompts, without a genome."""
        self.loop.run_until_complete(sample(self.engine, ["centre"], prompts, self.case.tokens))

    def one_by_one(self) -> None:
        """Answer the requests of some genomes, each genome alone."""
        for genome in self.genomes[:GENOMES_ONE_BY_ONE]:
            self.answer([genome], [0])

    def rates(self, seconds: list[float], genomes: int | None = None) -> list[float]:
        """Return tokens per second, of all genomes or of so many."""
        tokens = (genomes or self.case.genomes) * self.case.problems * self.case.tokens
        return [tokens / each for each in seconds]

    def close(self) -> None:
        """End the engine."""
        self.loop.run_until_complete(self.engine.close())


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds of the repeats of one function.

    Attributes:
        clock: wall-clock seconds; `processor` has those of all threads.
    """

    clock: list[float]
    processor: list[float]


def measured(
    functions: Mapping[str, Callable[[], object]], repeats: int, warmups: int = 1
) -> dict[str, Seconds]:
    """Run functions by turns, after rounds that do not count, with the collector as in a run."""
    processor: dict[str, list[float]] = {name: [] for name in functions}

    def timed(name: str, function: Callable[[], object]) -> None:
        began = time.process_time()
        function()
        processor[name].append(time.process_time() - began)

    turns = {name: partial(timed, name, function) for name, function in functions.items()}
    with rare_garbage_collection():
        clock = interleaved(turns, repeats, warmups)
    return {name: Seconds(clock[name], processor[name][-repeats:]) for name in functions}


def rows_of(contest: Contest) -> list[Row]:
    """Measure one model against `generate` and the floor."""
    case, floor = contest.case, Floor(contest)
    functions: dict[str, Callable[[], object]] = {
        "generate": contest.generate,
        "unperturbed": contest.unperturbed,
        "population": contest.population,
    }
    if case.make is endless_model and case.dtype == "float32":
        functions["one by one"] = contest.one_by_one
    kernels = floor.kernels()
    times = measured(functions | kernels | {"read": floor.read}, case.repeats)
    ours = times["population"].processor

    def rate(name: str) -> list[float]:
        return contest.rates(times[name].clock)

    def floor_of(kernel: str) -> list[float]:
        both = times[kernel].processor, times["read"].processor
        return [sum(pair) for pair in zip(*both, strict=True)]

    best = min(kernels, key=lambda kernel: statistics.median(times[kernel].processor))
    to_generate = ratios(times["generate"].processor, ours)
    to_unperturbed = ratios(times["unperturbed"].processor, ours)
    name = case.name
    population = f"{name}: engine, {case.genomes} rank-1 genomes, loading included"
    found = [
        row(f"{name}: transformers generate, unperturbed", rate("generate"), "tokens/s"),
        row(f"{name}: engine, unperturbed", rate("unperturbed"), "tokens/s"),
        row(population, rate("population"), "tokens/s"),
        row(f"{name}: population / generate", to_generate, "x", at_least=case.generate),
        row(f"{name}: population / unperturbed", to_unperturbed, "x", at_least=case.unperturbed),
    ]
    for kernel in kernels:
        shares = ratios(floor_of(kernel), ours)
        goal = case.share if kernel == best else None
        what = f"{name}: share of the floor, products by {kernel}"
        found.append(row(what, shares, "x", at_least=goal))
    reading = ratios(times["read"].processor, ours)
    found.append(row(f"{name}: of it reading keys and values", reading, "x"))
    if "one by one" in times:
        alone = contest.rates(times["one by one"].clock, GENOMES_ONE_BY_ONE)
        found.append(row(f"{name}: engine, one genome after the other", alone, "tokens/s"))
        share = GENOMES_ONE_BY_ONE / case.genomes
        to_alone = [
            t / share / o
            for t, o in zip(times["one by one"].clock, times["population"].clock, strict=True)
        ]
        found.append(
            row(f"{name}: population / one by one, by the clock", to_alone, "x", at_least=4)
        )
    return found


def rows_of_hybrid(contest: Contest) -> list[Row]:
    """Measure against `generate` alone, regardless of what the model caches."""
    functions = {"generate": contest.generate, "population": contest.population}
    times = measured(functions, contest.case.repeats)
    to_generate = ratios(times["generate"].processor, times["population"].processor)
    name = f"{contest.case.name}: population / generate"
    return [row(name, to_generate, "x", at_least=contest.case.generate)]


def main(part: str) -> None:
    """Measure and report."""
    loop = asyncio.new_event_loop()
    rows: list[Row] = []
    for case in CASES[2:] if part == "large" else (*CASES[:2], HYBRID):
        contest = Contest(loop, case)
        rows += rows_of_hybrid(contest) if case is HYBRID else rows_of(contest)
        contest.close()
        del contest
    loop.close()
    report("sampling", rows, part)


if __name__ == "__main__":
    main("large" if sys.argv[1:] == ["large"] else "")
