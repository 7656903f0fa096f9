"""Models whose embeddings are longer than their tokenizers, as gradients learn them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from es_cookbook.checkpoints.models import Vocabulary, keep_tokens, load_causal_lm
from es_cookbook.common.errors import ModelError
from es_cookbook.plugins.gradients.learner import learn_tokens_alone
from tests.tiny_models import FAMILIES, VOCABULARY, character_tokenizer

KNOWN = 30


@pytest.mark.parametrize(
    ("family", "has_bias"), [*((family, False) for family in FAMILIES), ("llama", True)]
)
def test_a_model_that_learns_has_the_distribution_of_engines(
    family: str, has_bias: bool, tiny_model: Callable[[str], Path]
) -> None:
    """In its own logits, and in those that others compute of its head's weight and bias."""
    lm = load_causal_lm(str(tiny_model(family)), "float32", torch.device("cpu"))
    if family == "gemma2":  # A cap as in published models; whatever is below it is as low as it.
        lm.config.final_logit_softcapping = 30.0
    head = lm.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    if has_bias:
        head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
    tokenizer = character_tokenizer(KNOWN)
    never = torch.tensor(sorted(Vocabulary(lm, tokenizer).never))
    assert never.tolist() == list(range(KNOWN, VOCABULARY))
    tokens = torch.tensor([[5, 6, 7, 8]])
    before = {name: value.clone() for name, value in lm.state_dict().items()}
    raw = lm(tokens).logits.detach()
    expected = keep_tokens(raw.clone(), never).log_softmax(-1)[..., :KNOWN]
    assert (raw.log_softmax(-1)[..., :KNOWN] - expected).abs().max() > 0.01

    learn_tokens_alone(lm, tokenizer)
    found = lm(tokens).logits.log_softmax(-1)[..., :KNOWN]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert lm.state_dict().keys() == before.keys()
    if family != "gemma2":  # Which bends its logits afterwards.
        states = lm.base_model(tokens).last_hidden_state
        by_hand = torch.nn.functional.linear(states, head.weight, head.bias).log_softmax(-1)
        torch.testing.assert_close(by_hand[..., :KNOWN], expected, atol=1e-4, rtol=0)
    lm.requires_grad_(True)
    lm(tokens).logits.log_softmax(-1)[..., 5].sum().backward()
    of_rows = head.weight.grad
    assert of_rows is not None and not of_rows[KNOWN:].any() and of_rows[:KNOWN].any()


def test_a_head_that_cannot_leave_rows_out_is_refused(tiny_model: Callable[[str], Path]) -> None:
    lm = load_causal_lm(str(tiny_model("llama")), "float32", torch.device("cpu"))

    class Head(torch.nn.Linear):
        pass

    lm.set_output_embeddings(Head(32, VOCABULARY))
    with pytest.raises(ModelError, match="rows without a token cannot be excluded"):
        learn_tokens_alone(lm, character_tokenizer(KNOWN))
