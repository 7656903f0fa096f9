"""Make bundled models: small ones that half know their task, taught by demonstrations.

A recipe's warm start says what is demonstrated: batches of what is asked and what is said. Here are
the options, the making, and the measuring on problems that the recipe holds out. Demonstrations of
chats are texts, one a turn, said to the recipe's own Env, whose answers are so those of the run;
each turn becomes an example: all that came before it, and the turn.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import anyio
import chz
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.baselines.small_model import (
    EOS,
    answer,
    build_model,
    build_tokenizer,
    fit,
    new_directory,
    save,
)
from es_cookbook.common.checks import check_range
from es_cookbook.common.fields.chz_fields import formerly
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.generated import FoldedDatasetBuilder
from es_cookbook.recipes.recipe import Recipe
from es_cookbook.rl.messages.message_env import MessageEnv, Script
from es_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Metrics, Tokenizer

Batch: TypeAlias = Sequence[tuple[str, str]]
"""What is asked, and what is said."""
Measure: TypeAlias = Callable[[Qwen2ForCausalLM, Qwen2Tokenizer], Iterable[str]]
"""Lines about a model."""

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
    steps: int = chz.field(default=1500, doc="optimizer steps")

    @chz.validate
    def _ranges(self) -> None:
        counts = {"steps", "batch_size", "num_problems"} & chz.chz_fields(self).keys()
        check_range(self, *sorted(counts), at_least=1)


@chz.chz
class ChatConfig(Config):
    """How a small model that talks is made."""

    num_problems: int = chz.field(
        default=12_000, doc="training problems demonstrated", metadata=formerly("chats")
    )
    batch_size: int = chz.field(default=64, doc="turns a step")
    depth: int = chz.field(default=2, doc="layers")


@dataclasses.dataclass(frozen=True)
class Phase:
    """Some steps of learning.

    Attributes:
        purpose: of the random numbers.
        batches: endless demonstrations; begins once all else is in order.
    """

    purpose: str
    batches: Callable[[random.Random], Iterator[Batch]]
    steps: int
    learning_rate: float = 5e-3


def make(
    config: Config,
    tokenizer: Qwen2Tokenizer,
    phases: Sequence[Phase],
    measure: Measure | None,
    model: Qwen2ForCausalLM | None = None,
) -> None:
    """Learn, measure after each phase, write the model; a small new one if none is given.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    model = model or build_model(tokenizer, config.seed, width=64, depth=2)
    for phase in phases:
        batches = phase.batches(random.Random(derive_seed(config.seed, phase.purpose)))

        def draw(batches: Iterator[Batch] = batches) -> tuple[list[str], list[str]]:
            batch = next(batches)
            return [asked for asked, _ in batch], [said for _, said in batch]

        fit(model, tokenizer, draw, steps=phase.steps, learning_rate=phase.learning_rate)
        for line in measure(model, tokenizer) if measure else ():
            print(line, flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def on_held_out(recipe: Recipe, samples: int = 0, folds: Sequence[int] = (1, 0)) -> Measure:
    """Measures greedy answers to the problems that a recipe holds out: means of its metrics.

    Args:
        recipe: of one turn.
        samples: answers at temperature 1, of which as many measure pass@k too; 0: none.
        folds: those that are not shown, where the recipe has some.
    """

    def lines(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> Iterator[str]:
        dataset = recipe.dataset()
        for fold in folds if isinstance(dataset, FoldedDatasetBuilder) else (None,):
            means = measured(recipe, model, tokenizer, fold, samples)
            told = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
            yield told if fold is None else f"fold {fold}: {told}"

    return lines


def measured(
    recipe: Recipe,
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    fold: int | None = None,
    samples: int = 0,
    **dataset: int,
) -> dict[str, float]:
    """The means, on a fold of held-out problems, of a data set with these fields."""
    given = dataset if fold is None else {"fold": fold, **dataset}
    envs_P = anyio.run(_envs, recipe, tokenizer, given)
    asked_P = [str(tokenizer.decode(list(env.observation.tokens_T))) for env in envs_P]

    def metrics(samples: int) -> list[list[Metrics]]:
        texts_P = answer(model, tokenizer, asked_P, recipe.max_tokens, samples)
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


async def _envs(recipe: Recipe, tokenizer: Tokenizer, given: Mapping[str, int]) -> list[ProblemEnv]:
    dataset = recipe.dataset(**given)
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
    """One token a character and one each of some longer words, with the tiny chat template."""
    tokenizer = build_tokenizer(characters)
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def turns(
    demonstrations: Iterable[tuple[MessageEnv, Sequence[str]]], tokenizer: Tokenizer
) -> list[tuple[str, str]]:
    """What the model has seen before each turn of demonstrations, and the turn."""

    async def said() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for env, texts in demonstrations:
            trajectory = await run_rollout(env, Script(texts, tokenizer))
            for transition in trajectory.transitions:
                seen = str(tokenizer.decode(list(transition.observation.tokens_T)))
                found.append((seen, transition.action.text + EOS))
        return found

    return anyio.run(said)


def make_talk(
    config: ChatConfig,
    tokenizer: Qwen2Tokenizer,
    demonstrate: Callable[[random.Random], tuple[MessageEnv, Sequence[str]]],
) -> None:
    """Learn whole chats, and write the model.

    Args:
        config: how.
        tokenizer: of `chat_tokenizer`.
        demonstrate: an Env of a training problem, and what to say in it.
    """

    def batches(rng: random.Random) -> Iterator[Batch]:
        examples = turns((demonstrate(rng) for _ in range(config.num_problems)), tokenizer)
        while True:
            yield rng.sample(examples, min(config.batch_size, len(examples)))

    model = build_model(tokenizer, config.seed, width=64, depth=config.depth)
    phase = Phase("chat_warm_start", batches, config.steps)
    make(config, tokenizer, [phase], None, model)
