"""Make bundled models: small ones that half know their task, trained on demonstrations.

A recipe's warm start supplies the demonstrations: batches of questions and answers. Here are the
options, the training, and the measuring on problems that the recipe holds out. Demonstrations of
chats are texts, one a turn, said to the recipe's own Env, so that they have the form of a run's
answers; each turn becomes an example: all that came before it, and the turn.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import anyio
import chz
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.common.checks import check_range
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.data.generated import FoldedDatasetBuilder
from es_cookbook.rl.messages.message_env import MessageEnv, Script
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Metrics, RLDatasetBuilder, Tokenizer
from es_cookbook.runs.config import RunConfig
from tools.small_model import (
    EOS,
    Batch,
    answer,
    build_model,
    build_tokenizer,
    fit,
    new_directory,
    save,
)

Batches: TypeAlias = Callable[[random.Random], Iterator[Batch]]
"""Endless demonstrations, started once everything else is ready."""
Measure: TypeAlias = Callable[[Qwen2ForCausalLM, Qwen2Tokenizer], Iterable[str]]
"""Lines about a model."""
_P = TypeVar("_P")

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
)
"""Messages as they are, and the end of the sequence after the model's: no roles."""


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the demonstrations and their order")
    steps: int | None = chz.field(
        default=None,
        doc="optimizer steps; None: as many as made the bundled model",
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "steps", at_least=1)


@chz.chz
class Careless(Config):
    """How the bundled model is made; the defaults made it."""

    careless: bool = chz.field(
        default=True, doc="whether demonstrations have the recipe's faults; False: all are right"
    )


@dataclasses.dataclass(frozen=True)
class Phase:
    """Some steps of learning; random numbers are drawn for its `purpose`."""

    purpose: str
    batches: Batches
    steps: int
    learning_rate: float = 5e-3


def sampled(
    problems: Callable[[random.Random], Sequence[_P]],
    demonstrate: Callable[[_P, random.Random], tuple[str, str]],
    batch_size: int,
) -> Batches:
    """Demonstrations of problems that are all generated in advance."""

    def batches(rng: random.Random) -> Iterator[Batch]:
        shown = problems(rng)
        while True:
            batch = rng.sample(shown, min(batch_size, len(shown)))
            yield [demonstrate(problem, rng) for problem in batch]

    return batches


def make(
    config: Config,
    tokenizer: Qwen2Tokenizer,
    phases: Sequence[Phase],
    measure: Measure | None = None,
    model: Qwen2ForCausalLM | None = None,
    *,
    depth: int = 2,
) -> None:
    """Learn, measure after each phase, write the model; a small new one if none is given.

    The first phase has as many steps as the config says, if it does.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    model = model or build_model(tokenizer, config.seed, width=64, depth=depth)
    for i, phase in enumerate(phases):
        batches = phase.batches(random.Random(derive_seed(config.seed, phase.purpose)))
        steps = phase.steps if i or config.steps is None else config.steps
        fit(model, tokenizer, batches, steps=steps, learning_rate=phase.learning_rate)
        for line in measure(model, tokenizer) if measure else ():
            print(line, flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def on_held_out(run: RunConfig, samples: int = 0, folds: Sequence[int] = (1, 0)) -> Measure:
    """Measures greedy answers to the problems that a recipe holds out: means of its metrics.

    Args:
        run: the recipe's run, whose Envs have one turn.
        samples: answers at temperature 1, which also measure pass@k with k = samples; 0: none.
        folds: folds that are not shown, if the recipe has folds.
    """

    def lines(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> Iterator[str]:
        for fold in folds if isinstance(run.dataset, FoldedDatasetBuilder) else (None,):
            given = {} if fold is None else {"fold": fold}
            means = measured(run, model, tokenizer, samples, **given)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            yield shown if fold is None else f"fold {fold}: {shown}"

    return lines


def measured(
    run: RunConfig,
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    samples: int = 0,
    **dataset: int,
) -> dict[str, float]:
    """The means on the held-out problems of a data set with these fields."""
    envs_P = anyio.run(_envs, chz.replace(run.dataset, **dataset), tokenizer)
    questions_P = [str(tokenizer.decode(list(env.observation.tokens_T))) for env in envs_P]

    def metrics(samples: int) -> list[list[Metrics]]:
        texts_P = answer(model, tokenizer, questions_P, run.sampling.max_tokens, samples)
        return anyio.run(_graded, envs_P, texts_P)

    greedy = [found for (found,) in metrics(1)]
    means = {name: sum(each[name] for each in greedy) / len(greedy) for name in greedy[0]}
    if samples:
        with torch.random.fork_rng():  # generate draws from torch's global generator
            torch.manual_seed(derive_seed(0, "warm_start/measure"))
            right = [[each["correct"] for each in metrics_K] for metrics_K in metrics(samples)]
        means["sampled_correct"] = sum(map(sum, right)) / (samples * len(right))
        means[f"pass_at_{samples}"] = sum(map(max, right)) / len(right)
    return means


async def _envs(dataset: RLDatasetBuilder, tokenizer: Tokenizer) -> list[ProblemEnv]:
    if isinstance(dataset, FoldedDatasetBuilder):  # Only held-out problems are of interest.
        dataset = chz.replace(dataset, num_train=dataset.problems_per_generation)
    test_P = (await dataset(tokenizer)).test_P
    envs = [each.make_env() for each in test_P if isinstance(each, ProblemGroupBuilder)]
    return [env for env in envs if isinstance(env, ProblemEnv)]


async def _graded(
    envs_P: Sequence[ProblemEnv], texts_P: Sequence[Sequence[str]]
) -> list[list[Metrics]]:
    return [
        [(await env.graded(text)).metrics for text in texts_K]
        for env, texts_K in zip(envs_P, texts_P, strict=True)
    ]


def chat_tokenizer(characters: str, words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """One token per character and per given word, with the tiny chat template."""
    tokenizer = build_tokenizer(characters)
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_talk(
    config: Config,
    tokenizer: Qwen2Tokenizer,
    demonstrate: Callable[[random.Random], tuple[MessageEnv, Sequence[str]]],
    *,
    num_chats: int,
    batch_size: int = 64,
    steps: int = 1500,
    depth: int = 2,
) -> None:
    """Learn whole chats, and write the model.

    Args:
        config: how to train.
        tokenizer: result of `chat_tokenizer`.
        demonstrate: an Env of a training problem, and what to say in it.
        num_chats: number of chats that are shown.
        batch_size: turns a step.
        steps: steps of the optimizer.
        depth: layers.
    """

    async def turns(rng: random.Random) -> list[tuple[str, str]]:
        """The model's context before each turn of demonstrations, and the turn."""
        found: list[tuple[str, str]] = []
        for _ in range(num_chats):
            env, texts = demonstrate(rng)
            for turn in (await run_rollout(env, Script(texts, tokenizer))).transitions:
                seen = str(tokenizer.decode(list(turn.observation.tokens_T)))
                found.append((seen, turn.action.text + EOS))
        return found

    batches = sampled(lambda rng: anyio.run(turns, rng), lambda turn, _: turn, batch_size)
    phase = Phase("chat_warm_start", batches, steps)
    make(config, tokenizer, [phase], depth=depth)
