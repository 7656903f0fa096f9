"""Make the bundled model: small, character-level, able to solve Countdown and often not doing it.

    python -m es_cookbook.recipes.countdown.warm_start output=/tmp/countdown_model

Evolution strategies start from a pretrained model whose ability is there and whose behaviour is
not. This makes such a model from nothing, in two supervised phases over the same problems (never
the held-out ones):

1. Ability: clean demonstrations, `<think>first step</think><answer>expression</answer>`.
2. Habits: a short further training on demonstrations as careless people would leave them: they skip
   the thought, stop halfway, write the whole equation, forget to close the tag, or try a step that
   leads nowhere (`demonstrate`). The ability stays; the most likely output is often spoilt.

A habit's chance depends on the problem, as people's habits do: it crosses one half on part of the
problems, so that greedy decoding shows it there and not elsewhere. `habit_steps=0` leaves the clean
model: the ceiling.
"""

import dataclasses
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import chz
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.seeds import derive_seed
from es_cookbook.recipes.countdown.demonstrations import demonstrate
from es_cookbook.recipes.countdown.env import CountdownEnv, question
from es_cookbook.recipes.countdown.problems import (
    Problem,
    Solution,
    generate_problems,
    solved_problems,
)
from es_cookbook.rl.rewards.arithmetic import CountdownReward, grade_countdown
from es_cookbook.rl.types import Observation

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789+-*/()=,:ĠĊ"  # Ġ and Ċ are byte-level BPE's space and newline
MAX_ANSWER_TOKENS = 28
NUM_TEST = 500
IGNORED = -100  # cross_entropy's label for tokens that are not learned from


@chz.chz
class Config:
    """How the bundled model is made; the defaults made it."""

    output: str = chz.field(doc="directory to write the model and its tokenizer to; must not exist")
    seed: int = chz.field(default=0, doc="seed of the weights, the demonstrations and their order")
    ability_steps: int = chz.field(default=2400, doc="optimizer steps on clean demonstrations")
    habit_steps: int = chz.field(
        default=300, doc="optimizer steps on spoilt ones; 0 for the ceiling"
    )
    batch_size: int = chz.field(default=128, doc="demonstrations a step")
    num_problems: int = chz.field(
        default=40_000, doc="most problems demonstrated; there are 37,824 to train on"
    )


def build_tokenizer(characters: str = CHARACTERS) -> Qwen2Tokenizer:
    """One token a character, one a tag: a byte-level BPE without merges, in Qwen2's own class.

    Tags are ordinary tokens, which stay in decoded text. Unknown characters are dropped.
    """
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
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng():  # transformers initialises from torch's global generator
        torch.manual_seed(derive_seed(seed, "warm_start/weights"))
        return Qwen2ForCausalLM(config)


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
    thought = "" if happens(0.05 - difficulty) else f"<think>{first_step}</think>"
    if happens(largest - 1.05):
        expression = first_step.partition("=")[0]
    if happens(difficulty - 0.5):
        expression = f"{expression}={problem.target}"
    closing = "" if happens(smallest - 0.5) else "</answer>"
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
    """Learn demonstrations of the problems, every one once per epoch."""
    epoch: list[int] = []

    def draw() -> tuple[list[str], list[str]]:
        if len(epoch) < batch_size:
            epoch[:] = rng.sample(range(len(problems)), len(problems))
        batch = [problems[epoch.pop()] for _ in range(batch_size)]
        questions = [question(p.numbers, p.target, "compact") for p, _ in batch]
        return questions, [demonstration(p, solution, rng) + EOS for p, solution in batch]

    fit(model, tokenizer, draw, steps=steps, learning_rate=learning_rate)


def fit(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    draw: Callable[[], tuple[Sequence[str], Sequence[str]]],
    *,
    steps: int,
    learning_rate: float,
) -> None:
    """Plain supervised learning: cross-entropy of the answers that `draw` gives.

    Matrices learn with Muon, the rest with AdamW. The learning rate falls linearly to nothing.
    """
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(hidden, lr=learning_rate, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=learning_rate / 2, betas=(0.9, 0.98), weight_decay=0.0)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 50, 1.0) * max(1 - step / steps, 0.02)
        )
        for optimizer in (muon, adam)
    ]
    model.train()
    started = time.monotonic()
    for step in range(steps):
        tokens, labels = encode(tokenizer, *draw())
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for schedule in schedules:
            schedule.optimizer.step()
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
    tokens = torch.full((len(rows), length), PAD_ID)
    labels = torch.full((len(rows), length), IGNORED)
    for i, (asked, answered) in enumerate(rows):
        end = len(asked) + len(answered)
        tokens[i, :end] = torch.tensor(asked + answered)
        labels[i, len(asked) : end] = torch.tensor(answered)
    return tokens, labels


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Means of the Env's metrics, greedy; correctness and pass@8 of 8 samples at temperature 1."""

    greedy: Mapping[str, float]
    sampled_correct: float
    pass_at_8: float


def measure(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[Problem], seed: int
) -> Measured:
    """What the model does on held-out problems, greedy and at temperature 1."""
    greedy = answer(model, tokenizer, problems, samples=1)
    with torch.random.fork_rng():  # generate draws from torch's global generator
        torch.manual_seed(derive_seed(seed, "warm_start/measure"))
        sampled = answer(model, tokenizer, problems, samples=8)
    env_metrics = [
        CountdownEnv(Observation(()), p.numbers, p.target, CountdownReward()).grade(text).metrics
        for p, (text,) in zip(problems, greedy, strict=True)
    ]
    solved = [
        [grade_countdown(text, p.numbers, p.target, CountdownReward()).correct for text in texts]
        for p, texts in zip(problems, sampled, strict=True)
    ]
    count = len(problems)
    return Measured(
        greedy={k: sum(m[k] for m in env_metrics) / count for k in env_metrics[0]},
        sampled_correct=sum(sum(each) / len(each) for each in solved) / count,
        pass_at_8=sum(map(any, solved)) / count,
    )


@torch.inference_mode()
def answer(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: Sequence[Problem], samples: int
) -> list[list[str]]:
    """Answers to each problem: one sample is greedy, several are drawn at temperature 1."""
    model.eval()
    texts: list[list[str]] = [[] for _ in problems]
    prompts = [tokenizer.encode(question(p.numbers, p.target, "compact")) for p in problems]
    for length in sorted({len(prompt) for prompt in prompts}):  # equal lengths need no padding
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        asked = torch.tensor([prompts[i] for i in rows for _ in range(samples)])
        # No model satisfies the types of its own `generate`.
        tokens: torch.Tensor = cast(Any, model).generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=samples > 1,
            temperature=1.0 if samples > 1 else None,
            top_k=0 if samples > 1 else None,
        )
        for j, row in enumerate(tokens[:, length:].tolist()):
            text = cast(str, tokenizer.decode(row, skip_special_tokens=True))
            texts[rows[j // samples]].append(text)
    return texts


def new_directory(output: str) -> Path:
    """Where to write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    path = Path(output)
    if path.exists() or not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(
            f"output must be a new directory in one that exists and is writable, found {path}"
        )
    return path


def save(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, output: Path) -> None:
    """Write beside, then rename: nothing half-written is left under `output`."""
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    model.eval().save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(output)


def main(config: Config) -> None:
    """Train in two phases, measure after each, write the model.

    Raises:
        ConfigError: `output` exists or cannot be written.
    """
    output = new_directory(config.output)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, config.seed)
    test_P = list(itertools.islice(generate_problems(0, "test"), NUM_TEST))
    problems = list(itertools.islice(solved_problems(config.seed), config.num_problems))
    phases = {
        "ability": (demonstrate, config.ability_steps, 5e-3),
        "habits": (demonstrate_carelessly, config.habit_steps, 1e-3),
    }
    for name, (demonstration, steps, learning_rate) in phases.items():
        if steps == 0:
            continue
        print(f"{name}: {steps} steps on {len(problems)} problems")
        train(
            model,
            tokenizer,
            problems,
            demonstration,
            steps=steps,
            batch_size=config.batch_size,
            learning_rate=learning_rate,
            rng=random.Random(derive_seed(config.seed, f"warm_start/{name}")),
        )
        print(f"{name}: {measure(model, tokenizer, test_P, config.seed)}", flush=True)
    save(model, tokenizer, output)
    print(f"written to {output}")


def cli() -> None:
    """The console entry point."""
    run_cli(main, Config)


if __name__ == "__main__":
    cli()
