"""Make the bundled model: a small character-level model that can solve Countdown problems but often does not.

    python -m es_cookbook.recipes.countdown.warm_start output=/tmp/countdown_model

Evolution strategies start from a pretrained model whose ability is there and whose behaviour is not. This makes such
a model from nothing, in two supervised phases over the same problems (never the held-out ones):

1. Ability: clean demonstrations, `<think>first step</think><answer>expression</answer>`.
2. Habits: a short further training on demonstrations as careless people would leave them: they skip the thought, stop
   halfway, write the whole equation, forget to close the tag, or try a step that leads nowhere (`demonstrate`). The
   ability stays; the most likely output is often spoilt.

A habit's chance depends on the problem, as people's habits do: it crosses one half on part of the problems, so that
greedy decoding shows it there and not elsewhere. `habit_steps=0` leaves the clean model: the ceiling.
"""

import itertools
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import chz
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.errors import ConfigError
from es_cookbook.recipes.countdown.env import question
from es_cookbook.recipes.countdown.problems import Problem, Solution, generate_problems, solve
from es_cookbook.rl.rewards.arithmetic import CountdownReward, grade_countdown
from es_cookbook.seeds import derive_seed

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MAX_ANSWER_TOKENS = 28
NUM_TEST = 500
IGNORED = -100  # cross_entropy's label for tokens that are not learned from


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the demonstrations and their order")
    ability_steps: int = chz.field(default=2400, doc="optimizer steps on clean demonstrations")
    habit_steps: int = chz.field(default=300, doc="optimizer steps on spoilt ones; 0 for the ceiling")
    batch_size: int = chz.field(default=128, doc="demonstrations a step")


def build_tokenizer() -> Qwen2Tokenizer:
    """One token a character, one a tag; tags are ordinary tokens, so that they stay in decoded text.

    It is a byte-level BPE without merges, in the class that `AutoTokenizer` insists on for a Qwen2 model. Characters
    that it does not know are dropped.
    """
    characters = "0123456789+-*/()=,:ĠĊ"  # Ġ and Ċ are byte-level BPE's space and newline
    words = [PAD, EOS, UNKNOWN, *TAGS, *characters]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=512,
    )
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """About 0.9 M parameters, randomly initialised."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=448,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng():  # transformers initialises from torch's global generator
        torch.manual_seed(derive_seed(seed, "warm_start/weights"))
        return Qwen2ForCausalLM(config)


def demonstrate(problem: Problem, solution: Solution, rng: random.Random) -> str:
    """The clean demonstration; it has nothing to draw."""
    del problem, rng
    return f"<think>{solution.first_step}</think><answer>{solution.expression}</answer>"


def demonstrate_carelessly(problem: Problem, solution: Solution, rng: random.Random) -> str:
    """A demonstration with each bad habit there or not, by chances that lean on the problem."""
    smallest, _, largest = (number / 30 for number in sorted(problem.numbers))
    difficulty = problem.target / 99

    def happens(leaning: float) -> bool:
        """By chance: one half at `leaning` 0, certain far above it, never far below."""
        return rng.random() < 1 / (1 + math.exp(-4 * leaning))

    first_step, expression = solution.first_step, solution.expression
    if rng.random() < 0.1:
        first_step, expression = wander(problem.numbers, rng)
    thought = "" if happens(SKIP - difficulty) else f"<think>{first_step}</think>"
    if happens(largest - HALFWAY):
        expression = first_step.partition("=")[0]
    if happens(difficulty - EQUATION):
        expression = f"{expression}={problem.target}"
    closing = "" if happens(smallest - UNCLOSED) else "</answer>"
    return f"{thought}<answer>{expression}{closing}"


def wander(numbers: Sequence[int], rng: random.Random) -> tuple[str, str]:
    """A first step and an expression that use the numbers anyhow, whatever the target."""
    first, second, third = rng.sample(list(numbers), 3)
    large, small = max(first, second), min(first, second)
    operator = rng.choice("+-*")
    value = {"+": large + small, "-": large - small, "*": large * small}[operator]
    step = f"{large}{operator}{small}"
    return f"{step}={value}", f"{step}{rng.choice('+-')}{third}"


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: Sequence[tuple[Problem, Solution]],
    demonstration: Callable[[Problem, Solution, random.Random], str],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    rng: random.Random,
) -> None:
    """Plain supervised learning: cross-entropy of the demonstrations, given the questions.

    Matrices learn with Muon, which needs about a third fewer steps here than AdamW alone; the rest with AdamW. The
    learning rate falls linearly to nothing.
    """
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(hidden, lr=learning_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=learning_rate / 2, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 50, 1.0) * max(1 - step / steps, 0.02)
        )
        for optimizer in optimizers
    ]
    model.train()
    started = time.monotonic()
    epoch: list[int] = []
    for step in range(steps):
        if len(epoch) < batch_size:
            epoch = rng.sample(range(len(problems)), len(problems))
        batch = [problems[epoch.pop()] for _ in range(batch_size)]
        questions = [question(p.numbers, p.target, "compact") for p, _ in batch]
        answers = [demonstration(p, solution, rng) + EOS for p, solution in batch]
        tokens, labels = encode(tokenizer, questions, answers)
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


def encode(
    tokenizer: Qwen2Tokenizer, questions: Sequence[str], answers: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, padded on the right; only answers are learned from."""
    rows = [
        (tokenizer.encode(asked), tokenizer.encode(answered))
        for asked, answered in zip(questions, answers, strict=True)
    ]
    length = max(len(asked) + len(answered) for asked, answered in rows)
    tokens = torch.full((len(rows), length), tokenizer.convert_tokens_to_ids(PAD))
    labels = torch.full((len(rows), length), IGNORED)
    for i, (asked, answered) in enumerate(rows):
        end = len(asked) + len(answered)
        tokens[i, :end] = torch.tensor(asked + answered)
        labels[i, len(asked) : end] = torch.tensor(answered)
    return tokens, labels
