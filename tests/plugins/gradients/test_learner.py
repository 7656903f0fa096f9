"""How a learner gets at its gradients: in rows, in halves, in parts, in less memory."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from numba.core import config

from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.plugins.gradients import learner as learner_module
from es_cookbook.plugins.gradients.learner import Learner, adamw, dtype_of_products
from es_cookbook.plugins.gradients.policy_gradient import PPO
from es_cookbook.plugins.gradients.sft import likelihood
from es_cookbook.rl.rollouts import Example
from tests.linear_models import LINEAR_FAMILIES, make_linear_model
from tests.tiny_models import VOCABULARY, new_model


def answers(seed: int = 0) -> list[Example]:
    """Several to each of some prompts that begin alike, some of which begin alike too."""
    rng = random.Random(seed)
    found: list[Example] = []
    for prompt in ((5, 6, 7, 8), (5, 6, 9), (4,)):
        for _ in range(4):
            said = [*rng.choice([(10, 11), (12,)]), *rng.choices(range(3, 30), k=rng.randint(1, 9))]
            learned = (False,) * len(prompt) + (True,) * len(said)
            sampled = (0.0,) * len(prompt) + tuple(-3 - rng.random() for _ in said)
            weight, count = rng.gauss(0, 1), rng.randint(1, 3)
            found.append(Example((*prompt, *said), learned, weight, sampled, count))
    return found


def learned(path: Path, examples: Sequence[Example], **how: Any) -> dict[str, torch.Tensor]:
    """The gradient, and what is measured of the examples."""
    lm = load_causal_lm(str(path), "float32", torch.device("cpu"))
    names = [name for name, _ in lm.named_parameters()]
    found = Learner(lm, names, max_gradient_norm=1e9, **how)
    measured = {
        f"logprobs {number}": torch.tensor(values)
        for number, values in enumerate(found.logprobs(examples))
    }
    found.step(examples, PPO().objective, 0.0, 0.25)
    gradients = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    return measured | gradients


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "gemma3", "gpt_neox"])
def test_parts_and_halves_change_nothing(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples, is_linear = answers(), family in LINEAR_FAMILIES
    path = make_linear_model(family, tmp_path / "model") if is_linear else tiny_model(family)
    plain = learned(path, examples, tokens_per_pass=1000)
    limited = {"tokens_per_pass": 50}
    for logits, worth, how in (
        (2 * VOCABULARY, 256, {}),
        (3 * VOCABULARY, 256, limited),
        (2 * VOCABULARY, 1, {}),  # A pass for each prompt.
        (2 * VOCABULARY, 1, limited),
    ):
        monkeypatch.setattr(learner_module, "LOGITS_AT_ONCE", logits)
        monkeypatch.setattr(learner_module, "WORTH_A_PASS", worth)
        found = learned(path, examples, **how)
        assert found.keys() == plain.keys()
        for name, values in plain.items():
            torch.testing.assert_close(found[name], values, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt_neox", "mamba"])
def test_a_prompt_is_read_once_for_all_its_answers(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_module, "WORTH_A_PASS", 1)
    if family == "mamba":  # It keeps a state in place of keys and values.
        sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
        lm = new_model("mamba", vocab_size=VOCABULARY, **sizes).eval()
    else:
        lm = load_causal_lm(str(tiny_model(family)), "float32", torch.device("cpu"))
    learner = Learner(lm, [name for name, _ in lm.named_parameters()])
    read: list[int] = []
    lm.get_input_embeddings().register_forward_hook(
        lambda _, given, __: read.append(given[0].numel())
    )
    said = [(10, 11, 12), (13,), (14, 15)]
    learner.logprobs([Example((5, 6, 7, 8, *s), (False,) * 4 + (True,) * len(s)) for s in said])
    # The last token of the prompt is read with each answer, as its first token follows from it.
    assert read == ([3 * 7] if family == "mamba" else [3, 3 * 4])


def test_a_step_tells_what_was_maximised_before_it(tiny_model: Callable[[str], Path]) -> None:
    lm = load_causal_lm(str(tiny_model("qwen2")), "float32", torch.device("cpu"))
    learner = Learner(lm, ["model.norm.weight"], tokens_per_pass=30)
    examples = answers()
    told = zip(examples, learner.logprobs(examples), strict=True)
    weighted = math.fsum(each.weight * each.count * math.fsum(told_T) for each, told_T in told)
    gain, norm = learner.step(examples, likelihood, 0.01, 0.25)
    assert gain == pytest.approx(0.25 * weighted, rel=1e-4) and norm > 0


def test_a_first_step_of_adamw_has_the_length_of_the_rate_and_its_weight_decay(
    tiny_model: Callable[[str], Path],
) -> None:
    name, moved = "model.layers.0.mlp.up_proj.weight", list[torch.Tensor]()
    for optimizers in (adamw, functools.partial(adamw, weight_decay=0.5)):
        lm = load_causal_lm(str(tiny_model("qwen2")), "float32", torch.device("cpu"))
        before = lm.get_parameter(name).detach().clone()
        Learner(lm, [name], optimizers=optimizers).step(answers(), likelihood, 0.01, 0.25)
        moved.append(lm.get_parameter(name).detach() - before)
    assert moved[0].abs().median().item() == pytest.approx(0.01, rel=1e-2)
    torch.testing.assert_close(moved[1], moved[0] - 0.01 * 0.5 * before, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("wanted", "base_dtype", "features", "products"),
    [
        ("auto", "bfloat16", "+avx512bf16", torch.bfloat16),
        ("auto", "bfloat16", "+avx2", torch.float32),
        ("auto", "float32", "+avx512bf16", torch.float32),
        ("float32", "bfloat16", "+avx512bf16", torch.float32),
        ("bfloat16", "bfloat16", "+avx512bf16", torch.bfloat16),
        ("bfloat16", "bfloat16", "+avx2", torch.bfloat16),
    ],
)
def test_products_are_in_what_the_processor_is_fastest_in(
    monkeypatch: pytest.MonkeyPatch,
    wanted: Literal["auto", "float32", "bfloat16"],
    base_dtype: str,
    features: str,
    products: torch.dtype,
) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert dtype_of_products(wanted, base_dtype, torch.device("cpu")) == products


def test_products_of_bfloat16_leave_the_direction(tiny_model: Callable[[str], Path]) -> None:
    examples = answers()
    exact, found = (
        learned(tiny_model("qwen2"), examples, products=products)
        for products in (torch.float32, torch.bfloat16)
    )
    one, other = (
        torch.cat([grad.flatten() for name, grad in of.items() if " " not in name])
        for of in (exact, found)
    )
    assert one.dtype == other.dtype == torch.float32
    alike = torch.nn.functional.cosine_similarity(one, other, dim=0)
    assert 0.99 < alike < 1 - 1e-9
