"""Which rows of a model's vocabulary are tokens: these alone are sampled.

Embeddings are often longer than the tokenizer, padded to a round number or for tokens that were
never added, and a tokenizer may have holes. Such rows have no text. Their logits are far below all
others, so the distribution is over the tokens that there are.
"""

from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from es_cookbook.checkpoints.models import end_of_sequence_ids
from es_cookbook.common.errors import ModelError

_LOW = -1e9
"""A logit that is added, and may be multiplied afterwards."""


class Vocabulary:
    """The tokens of a model.

    Attributes:
        size: rows of its embedding.
        ends: tokens that end a sequence, which its tokenizer need not know.
        never: rows of its head that are no token, which are not sampled.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.size = cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
        self.ends = end_of_sequence_ids(model, tokenizer)
        named = {*tokenizer.get_vocab().values(), *self.ends}
        # A head may have fewer rows than the embedding, or more.
        num_logits = getattr(model.get_output_embeddings(), "out_features", self.size)
        self.never = frozenset(range(num_logits)) - named


class _TokensAlone(torch.nn.Linear):
    """A head whose logits of rows that are no token are far below all others.

    They are by its bias, which those read that compute logits of its weight themselves. Its
    parameters, and so its files, are as they were.
    """

    never: torch.Tensor

    @property
    def bias(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        own = self._parameters["bias"]
        bias = self.weight.new_zeros(self.out_features) if own is None else own
        return bias.index_fill(0, self.never.to(bias.device), _LOW)


def learn_tokens_alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Change a model's own logits as engines do, so that both have one distribution.

    Raises:
        ModelError: It has rows that are no token, and a head that is no linear layer.
    """
    never = Vocabulary(model, tokenizer).never
    head = cast("torch.nn.Module", model.get_output_embeddings())
    if not never:
        return
    if type(head) is not torch.nn.Linear:
        raise ModelError(
            f"its head is a {type(head).__name__}, in which {len(never):,} rows of its vocabulary "
            "that are no tokens cannot be left out of what is learned; accepted: a linear layer"
        )
    head.__class__ = _TokensAlone
    cast("_TokensAlone", head).never = torch.tensor(sorted(never))


def keep_tokens(logits: torch.Tensor, never: torch.Tensor) -> torch.Tensor:
    """Logits, changed in place: those that are of no token are as low as their type can say.

    They stay finite, since kernels read what is infinite slowly.
    """
    return logits.index_fill_(-1, never, torch.finfo(logits.dtype).min)
