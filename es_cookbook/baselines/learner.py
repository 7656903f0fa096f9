"""A model that learns from token sequences: log-probabilities, optimizers, and the files of both.

Everything here that learns by gradients does so by `Learner.step`: supervised fine-tuning, the
small models that recipes begin with, and policy gradients.

Sequences are padded on the right, where no real token sees the padding, so any token will do for
it, and a tokenizer needs none of its own nor the model a mask. A batch that is too large for one
pass goes in parts of similar length through the model, and their gradients add up: parts change
memory and speed, and nothing else.

Packed, several sequences share a row, one behind the other. Positions begin again with each, from
which transformers tells that none may see those before it; whether a model's class does is tried.

The model stays in evaluation mode: it learns what it samples with, without dropout.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.rl.rollouts import Example

OPTIMIZER = "optimizer.safetensors"


Row: TypeAlias = Sequence[Example]
"""Sequences that go through the model as one, behind each other; one if they are not packed."""
Objective: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Log-probabilities now, when sampled, and weights -> what is maximised; one a learned token."""
Optimizers: TypeAlias = Callable[
    [Mapping[str, torch.nn.Parameter]], Sequence[torch.optim.Optimizer]
]
"""The weights that learn, by name -> what moves them; `lr` is a factor on each step's rate."""


def adamw(
    weights: Mapping[str, torch.nn.Parameter], weight_decay: float = 0.0
) -> Sequence[torch.optim.Optimizer]:
    return [torch.optim.AdamW(weights.values(), lr=1.0, weight_decay=weight_decay)]


class Learner:
    """A model, some of whose weights learn.

    Args:
        model: its parameters do not require gradients.
        names: of the parameters that learn.
        tokens_per_pass: most tokens, padding included, of one backward pass.
        optimizers: made once, for all weights that learn.
        packed_length: most tokens of a row of several sequences; 0 packs none.

    Raises:
        ConfigError: A name is no parameter's own, or the model's class cannot be packed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: Iterable[str],
        *,
        tokens_per_pass: int,
        optimizers: Optimizers = adamw,
        max_gradient_norm: float = 1.0,
        packed_length: int = 0,
    ) -> None:
        self.model = model
        self.weights = trained_weights(model, names)
        self._tokens_per_pass = tokens_per_pass
        self._max_gradient_norm = max_gradient_norm
        self._packed_length = packed_length
        if packed_length:
            self._check_packing()
        self._optimizers = optimizers(self.weights) if self.weights else []
        self._factors = [optimizer.defaults["lr"] for optimizer in self._optimizers]
        name_of = {weight: name for name, weight in self.weights.items()}
        self._states = {
            name_of[weight]: optimizer.state
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for weight in group["params"]
        }

    def step(
        self, examples: Sequence[Example], objective: Objective, learning_rate: float, share: float
    ) -> tuple[float, float]:
        """One step up: the objective's sum over learned tokens and `count`, times `share`.

        Returns:
            What was maximised, before the step, and the gradient's length before it was cut.
        """
        for weight in self.weights.values():
            weight.grad = None
        total = 0.0
        for part in self._parts(examples):
            logprobs = self._logprobs(part)
            sampled, weights, counts = (
                torch.tensor(values, dtype=torch.float32, device=logprobs.device)
                for values in zip(*map(_of_token, learned_tokens(part)), strict=True)
            )
            gain = share * (objective(logprobs, sampled, weights) * counts).sum()
            (-gain).backward()
            total += gain.item()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self._max_gradient_norm)
        for optimizer, factor in zip(self._optimizers, self._factors, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
            optimizer.step()
        return total, float(norm)

    @torch.no_grad()
    def logprobs(self, examples: Sequence[Example]) -> list[tuple[float, ...]]:
        """Of each example's learned tokens, in order."""
        return self._by_example(examples, self._logprobs)

    @torch.no_grad()
    def entropies(self, examples: Sequence[Example]) -> list[tuple[float, ...]]:
        """In nats, of the distribution over all tokens that each learned one was drawn from."""

        def of_part(part: Sequence[Row]) -> torch.Tensor:
            return torch.special.entr(self._logits(part)[0].softmax(dim=-1)).sum(dim=-1)

        return self._by_example(examples, of_part)

    def _by_example(
        self, examples: Sequence[Example], of_part: Callable[[Sequence[Row]], torch.Tensor]
    ) -> list[tuple[float, ...]]:
        """A number for each learned token, of all parts; returns each example's, in order."""
        found: dict[int, list[float]] = {id(example): [] for example in examples}
        for part in self._parts(examples):
            for (example, _), number in zip(
                learned_tokens(part), of_part(part).tolist(), strict=True
            ):
                found[id(example)].append(number)
        return [tuple(found[id(example)]) for example in examples]

    def _check_packing(self) -> None:
        """Refuse a model in which a sequence sees others of its row."""
        own = [Example((3, 4, 5, 6, 7), (True,) * 5), Example((6, 3, 7), (True,) * 3)]
        (_, second), length = self.logprobs(own), self._packed_length
        self._packed_length = 0
        (_, alone), self._packed_length = self.logprobs(own), length
        if max(abs(a - b) for a, b in zip(alone, second, strict=True)) > 1e-3:
            raise ConfigError(
                f"packing: in a {type(self.model).__name__} the rows of one sequence would see "
                "each other; leave packing out"
            )

    def _parts(self, examples: Sequence[Example]) -> list[list[Row]]:
        learned = [example for example in examples if any(example.learned_T[1:])]
        rows = (
            packed(learned, self._packed_length) if self._packed_length else [[e] for e in learned]
        )
        return in_parts(rows, self._tokens_per_pass)

    def _logprobs(self, part: Sequence[Row]) -> torch.Tensor:
        """Of all learned tokens of a part, in the order of `learned_tokens`."""
        logits_N_V, tokens_N = self._logits(part)
        return -torch.nn.functional.cross_entropy(logits_N_V, tokens_N, reduction="none")

    def _logits(self, part: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """What each learned token was drawn from, and the token."""
        shape = len(part), max(map(length_of, part))
        tokens_B_T, positions_B_T = torch.zeros(2, *shape, dtype=torch.long)
        learned_B_T = torch.zeros(shape, dtype=torch.bool)
        for b, row in enumerate(part):
            start = 0
            for example in row:
                end = start + len(example.tokens_T)
                tokens_B_T[b, start:end] = torch.tensor(example.tokens_T)
                learned_B_T[b, start + 1 : end] = torch.tensor(example.learned_T[1:])
                positions_B_T[b, start:end] = torch.arange(end - start)
                start = end
        device = self.model.device
        how = {"position_ids": positions_B_T.to(device)} if self._packed_length else {}
        # No model satisfies the types of its own call.
        model = cast("Callable[..., CausalLMOutputWithPast]", self.model)
        found = model(input_ids=tokens_B_T.to(device), use_cache=False, **how)
        logits_B_T_V = cast(torch.Tensor, found.logits)
        logits_N_V = logits_B_T_V[:, :-1][learned_B_T[:, 1:].to(device)].float()
        return logits_N_V, tokens_B_T[:, 1:][learned_B_T[:, 1:]].to(device)

    def save_moments(self, directory: Path) -> None:
        """Write what the optimizers remember; the weights are the model's own files."""
        tensors = {
            f"{name}/{moment}": value.contiguous()
            for name, weight in self.weights.items()
            for moment, value in self._states[name].get(weight, {}).items()
        }
        save_file(tensors, directory / OPTIMIZER)

    def load(self, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
        """Go on from weights, and from what `save_moments` wrote.

        Raises:
            RunDirectoryError: It is not of these weights.
        """
        try:
            moments = load_file(directory / OPTIMIZER)
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(weights[name])
            for key, value in moments.items():
                name, _, moment = key.rpartition("/")
                weight = self.weights[name]
                device = "cpu" if moment == "step" else weight.device
                self._states[name][weight][moment] = value.to(device)
        except (OSError, KeyError, RuntimeError) as error:
            raise RunDirectoryError(
                f"{directory} is no checkpoint of this run: {type(error).__name__}: {error}"
            ) from error


def trained_weights(model: PreTrainedModel, names: Iterable[str]) -> dict[str, torch.nn.Parameter]:
    """The named parameters, which require gradients from now on.

    Raises:
        ConfigError: A name is no parameter's own.
    """
    parameters = dict(model.named_parameters())
    weights: dict[str, torch.nn.Parameter] = {}
    for name in names:
        if name not in parameters:
            raise ConfigError(
                f"trained: {name} cannot be trained by gradients here, since it is part of a "
                "parameter, or made of others"
            )
        parameters[name].requires_grad_()
        weights[name] = parameters[name]
    return weights


def learned_tokens(part: Sequence[Row]) -> Iterator[tuple[Example, int]]:
    """Every token that has a loss, row by row: its example, and its place there."""
    for example in itertools.chain(*part):
        for t in range(1, len(example.tokens_T)):
            if example.learned_T[t]:
                yield example, t


def _of_token(token: tuple[Example, int]) -> tuple[float, float, float]:
    example, t = token
    return example.sampled_T[t] if example.sampled_T else 0.0, example.weight, example.count


def length_of(row: Row) -> int:
    return sum(len(example.tokens_T) for example in row)


def packed(examples: Sequence[Example], length: int) -> list[Row]:
    """Rows of at most so many tokens, the longest sequences first; a longer one has its own.

    >>> rows = packed([Example((1,) * n, (True,) * n) for n in (2, 5, 3, 4)], 7)
    >>> [[len(example.tokens_T) for example in row] for row in rows]
    [[5, 2], [4, 3]]
    """
    rows: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: -len(example.tokens_T)):
        for row in rows:
            if length_of(row) + len(example.tokens_T) <= length:
                row.append(example)
                break
        else:
            rows.append([example])
    return list(rows)


def in_parts(rows: Sequence[Row], tokens_per_pass: int) -> list[list[Row]]:
    """Rows of similar length together, each part of so many tokens at most, padding included.

    What fits into one part keeps its order.

    >>> a, b, c = ([Example((1,) * n, (True,) * n)] for n in (3, 9, 4))
    >>> [[length_of(row) for row in part] for part in in_parts([a, b, c], 10)]
    [[3, 4], [9]]
    """
    if rows and len(rows) * max(map(length_of, rows)) <= tokens_per_pass:
        return [list(rows)]
    parts: list[list[Row]] = []
    for row in sorted(rows, key=length_of):
        if not parts or (len(parts[-1]) + 1) * length_of(row) > tokens_per_pass:
            parts.append([])
        parts[-1].append(row)
    return parts
