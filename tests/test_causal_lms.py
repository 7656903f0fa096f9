"""What tests of many models rely on: they are small, causal, and the same each time."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.causal_lms import CAUSAL_LM_CLASSES, UNBUILDABLE, VARIANTS, VOCABULARY, build

TOKENS = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
MAX_BYTES = 5_000_000


def log_probabilities(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Shape (tokens, entries of the vocabulary)."""
    with torch.no_grad():
        return model(input_ids=tokens).logits[0].log_softmax(-1)


def sees_the_future(model: PreTrainedModel) -> bool:
    """Whether another last token, or none, changes what is predicted before it."""
    changed = TOKENS.clone()
    changed[0, -1] = VOCABULARY - 1
    full, changed, shorter = (
        log_probabilities(model, tokens)[: TOKENS.shape[1] - 1]
        for tokens in (TOKENS, changed, TOKENS[:, :-1])
    )
    return not all(torch.allclose(full, other, atol=1e-4) for other in (changed, shorter))


def test_every_class_is_built_or_it_is_said_why_not() -> None:
    classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert {*CAUSAL_LM_CLASSES, *UNBUILDABLE} == classes
    assert not set(CAUSAL_LM_CLASSES) & set(UNBUILDABLE)
    assert {name.split()[0] for name in VARIANTS} <= set(CAUSAL_LM_CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CAUSAL_LM_CLASSES, *VARIANTS])
def test_it_is_a_small_causal_language_model(name: str) -> None:
    model = build(name)
    parameters = dict(model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    assert sum(parameter.nbytes for parameter in parameters.values()) <= MAX_BYTES
    assert not model.training

    found = log_probabilities(model, TOKENS)
    assert found.shape[0] == TOKENS.shape[1]
    assert found.shape[1] >= VOCABULARY
    assert found.isfinite().all()
    assert 0.4 < found.std() < 3
    assert not sees_the_future(model)

    if name in VARIANTS:
        torch.testing.assert_close(log_probabilities(build(name), TOKENS), found, atol=1e-5, rtol=0)
        of_class = log_probabilities(build(name.partition(" ")[0]), TOKENS)
        assert not torch.allclose(found, of_class, atol=1e-2), "a variant is another model"
