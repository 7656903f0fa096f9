"""Entropies of sampled tokens, beside the formula."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from es_cookbook.baselines.learner import Learner
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.rl.rollouts import Example


def test_entropies_are_those_of_the_whole_distribution(tiny_model: Callable[[str], Path]) -> None:
    model = load_causal_lm(str(tiny_model("qwen2")), "float32", torch.device("cpu"))
    long = Example((5, 6, 7, 8, 9), (False, False, True, True, True))
    short = Example((4, 9, 3), (False, True, True))
    found = Learner(model, (), tokens_per_pass=1000).entropies([long, short])
    alone = Learner(model, (), tokens_per_pass=1).entropies([long, short])
    for example, entropies_T, alone_T in zip((long, short), found, alone, strict=True):
        logits = model(input_ids=torch.tensor([example.tokens_T])).logits[0].double()
        literal = [
            -sum(p * math.log(p) for p in logits[t - 1].softmax(0).tolist())
            for t, learned in enumerate(example.learned_T)
            if learned
        ]
        assert entropies_T == pytest.approx(literal, abs=1e-4)
        assert alone_T == pytest.approx(literal, abs=1e-4)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()  # Tied: all logits are 0.
    (uniform_T,) = Learner(model, (), tokens_per_pass=1000).entropies([short])
    assert uniform_T == pytest.approx([math.log(model.config.vocab_size)] * 2)
