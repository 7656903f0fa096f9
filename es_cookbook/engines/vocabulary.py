"""The rows of a model's vocabulary that are tokens: only these are sampled.

Embeddings are often longer than the tokenizer, padded to a round number or for tokens that were
never added, and a tokenizer may have holes. Such rows have no text. Their logits are far below all
others, so the distribution is over existing tokens.
"""

from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from es_cookbook.checkpoints.models import end_of_sequence_ids


class Vocabulary:
    """The tokens of a model.

    Attributes:
        size: rows of its embedding.
        ends: tokens that end a sequence, which its tokenizer need not know.
        never: rows of its head without a token, which are not sampled.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.size = cast("torch.nn.Embedding", model.get_input_embeddings()).num_embeddings
        self.ends = end_of_sequence_ids(model, tokenizer)
        named = {*tokenizer.get_vocab().values(), *self.ends}
        # A head may have fewer rows than the embedding, or more.
        num_logits = getattr(model.get_output_embeddings(), "out_features", self.size)
        self.never = frozenset(range(num_logits)) - named


def keep_tokens(logits: torch.Tensor, never: torch.Tensor) -> torch.Tensor:
    """Mask logits in place: those without a token get the lowest value of their type.

    They stay finite, since kernels read infinities slowly.
    """
    return logits.index_fill_(-1, never, torch.finfo(logits.dtype).min)
