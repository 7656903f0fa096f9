"""What a lane asks of how its batches run."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from es_cookbook.engines.torch.forward.population_layers import PopulationModel
from es_cookbook.engines.torch.forward.slots import SlotTable
from es_cookbook.engines.torch.forward.work_queue import Admission, Work


class Forward(Admission, Protocol):
    """How one lane's batches run: on the `flat` path, or by the model's `own` forward.

    Attributes:
        elastic: running requests may be moved together.
        num_prefilled: prompt tokens run so far, and `num_cached` those taken from what was kept.
    """

    elastic: bool
    num_prefilled: int
    num_cached: int

    def fit(self, num_slots: int, slot_length: int) -> None:
        """Make room for so many requests of so many tokens each."""

    def turn_to(self, model: PopulationModel) -> None:
        """Run this model from now on; no request is running."""

    def rest(self) -> None:
        """Let go of the model."""

    def prefill(
        self, table: SlotTable, placed: Sequence[tuple[Work, int]]
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Run the prompts of requests in their slots.

        Yields slots, and float32 logits (slots, vocabulary) of their first tokens, until all are
        done; they may be sampled, and slots released, in between.
        """
        ...

    def decode(self, table: SlotTable) -> torch.Tensor:
        """Run every slot's newest token: logits of at least the slots that are active."""
        ...

    def keep(self, order: np.ndarray) -> None:
        """Move these slots to the front, in this order."""

    def ended(self, table: SlotTable, slots: Sequence[int]) -> None:
        """Requests in these slots have all their tokens: a next turn may begin with them."""

    def score(self, works: Sequence[Work]) -> list[torch.Tensor]:
        """Log-probabilities of the continuations of logprobs requests; slots stay as they are."""
        ...
