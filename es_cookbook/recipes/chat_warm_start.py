"""Small models that talk: a tiny chat template, and learning from demonstrations of whole chats.

A recipe's warm start demonstrates problems by texts, one a turn. Each is said to the recipe's own
Env, whose answers are so those of the run, and each turn becomes an example: all that came before
it, and the turn. Only turns of the model are learned.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import anyio
import chz
from transformers import Qwen2Tokenizer

from es_cookbook.baselines.small_model import (
    EOS,
    build_model,
    build_tokenizer,
    fit,
    new_directory,
    save,
)
from es_cookbook.common.checks import check_range
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.messages.message_env import MessageEnv
from es_cookbook.rl.messages.script import Script
from es_cookbook.rl.rollouts import run_rollout
from es_cookbook.rl.types import Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
)
"""Messages as they are, and the end of the sequence after the model's: no roles."""
WIDTH = 64


@chz.chz
class Config:
    """How a small model is made."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the demonstrations and their order")
    chats: int = chz.field(default=12_000, doc="demonstrations of training problems")
    steps: int = chz.field(default=1500, doc="optimizer steps")
    batch_size: int = chz.field(default=64, doc="turns a step")
    depth: int = chz.field(default=2, doc="layers")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "chats", "steps", "batch_size", "depth", at_least=1)


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


def make(
    config: Config,
    tokenizer: Qwen2Tokenizer,
    demonstrate: Callable[[random.Random], tuple[MessageEnv, Sequence[str]]],
) -> Path:
    """Learn from demonstrations, and write the model.

    Args:
        config: how.
        tokenizer: of `chat_tokenizer`.
        demonstrate: an Env of a training problem, and what to say in it.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    model = build_model(tokenizer, config.seed, WIDTH, config.depth)
    rng = random.Random(derive_seed(config.seed, "chat_warm_start"))
    examples = turns((demonstrate(rng) for _ in range(config.chats)), tokenizer)

    def draw() -> tuple[list[str], list[str]]:
        batch = rng.sample(examples, min(config.batch_size, len(examples)))
        return [seen for seen, _ in batch], [turn for _, turn in batch]

    fit(model, tokenizer, draw, steps=config.steps, learning_rate=5e-3)
    save(model, tokenizer, output)
    print(f"written to {output}")
    return output
