"""Small character-level models for trials, trained from scratch in seconds to minutes.

A recipe's warm start teaches such a model its task on demonstrations, and stops before it has
learned it well: what evolution strategies begin with. One token a character and one a tag, a Qwen2
of up to a million parameters. They are trained as `es-cookbook sft` trains (`sft.learn`), by other
optimizers, which learn faster from nothing.
"""

import itertools
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import whole_directory
from es_cookbook.common.seeds import derive_seed
from es_cookbook.plugins.gradients.learner import Learner
from es_cookbook.plugins.gradients.sft import learn
from es_cookbook.plugins.gradients.supervised import joined
from es_cookbook.rl.rollouts import Example

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
Batch: TypeAlias = Sequence[tuple[str, str]]
"""Questions with their answers."""


def build_tokenizer(characters: str) -> Qwen2Tokenizer:
    """One token per character and per tag: a byte-level BPE without merges, in Qwen2's class.

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


def build_model(
    tokenizer: Qwen2Tokenizer, seed: int, width: int = 128, depth: int = 4
) -> Qwen2ForCausalLM:
    """A randomly initialised model, by default of about 0.9 M parameters.

    `width` is the hidden size, a multiple of 16; `depth` the number of layers.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=width * 7 // 2,
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


def happens(leaning: float, rng: random.Random) -> bool:
    """Draw with logistic probability: one half at `leaning` 0, 1 far above it, 0 far below."""
    return rng.random() < 1 / (1 + math.exp(-leaning))


def fit(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    batches: Iterator[Batch],
    *,
    steps: int,
    learning_rate: float,
) -> None:
    """Plain supervised learning: cross-entropy of the answers.

    `sft.learn` with `muon`: the learning rate rises for 50 steps and falls linearly to nothing. A
    step is one pass, its rows in the order that they were drawn in.
    """
    names = [name for name, _ in model.named_parameters()]
    learner = Learner(model.eval(), names, tokens_per_pass=sys.maxsize, optimizers=muon)
    started = time.monotonic()
    for step, batch in enumerate(itertools.islice(batches, steps)):
        factor = min((step + 1) / 50, 1.0) * max(1 - step / steps, 0.02)
        loss, _ = learn(learner, to_examples(tokenizer, batch), learning_rate * factor)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps}  loss {loss:.3f}  {seconds:.0f} s", flush=True)


def muon(weights: Mapping[str, torch.nn.Parameter]) -> Sequence[torch.optim.Optimizer]:
    """Muon for matrices; for the rest, embeddings too, AdamW at half the rate."""
    hidden = [w for name, w in weights.items() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in weights.items() if w.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=1.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.5, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def to_examples(tokenizer: Qwen2Tokenizer, batch: Batch) -> list[Example]:
    """Token sequences with a loss on the answers only."""
    return [
        joined([(tokenizer.encode(asked), False), (tokenizer.encode(answered), True)])
        for asked, answered in batch
    ]


@torch.inference_mode()
def answer(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    questions: Sequence[str],
    max_tokens: int,
    samples: int = 1,
) -> list[list[str]]:
    """Answers to each question: one sample is greedy, several are drawn at temperature 1.

    Several come from torch's global generator.
    """
    model.eval()
    texts: list[list[str]] = [[] for _ in questions]
    prompts = [tokenizer.encode(question) for question in questions]
    for length in sorted({len(prompt) for prompt in prompts}):  # equal lengths need no padding
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        asked = torch.tensor([prompts[i] for i in rows for _ in range(samples)])
        # No model satisfies the types of its `generate`.
        tokens: torch.Tensor = cast(Any, model).generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=max_tokens,
            do_sample=samples > 1,
            temperature=1.0 if samples > 1 else None,
            top_k=0 if samples > 1 else None,
        )
        for j, row in enumerate(tokens[:, length:].tolist()):
            text = cast(str, tokenizer.decode(row, skip_special_tokens=True))
            texts[rows[j // samples]].append(text)
    return texts


def new_directory(output: str) -> Path:
    """The directory to write the model to.

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
    """Write the model directory atomically."""
    with whole_directory(output) as directory:
        model.eval().save_pretrained(directory)
        tokenizer.save_pretrained(directory)
