"""A model that learns from token sequences: log-probabilities, optimizers, and the files of both.

Everything here that learns by gradients does so by `Learner.step`: supervised fine-tuning, the
small models that recipes begin with, and policy gradients.

Sequences are padded on the right, where no real token sees the padding, so any token will do for
it, and a tokenizer needs none of its own. A batch that is too large for one pass goes in parts of
similar length through the model, and their gradients add up: parts change memory and speed, and
nothing else.

In a long enough row several sequences lie one behind the other, and what they begin with in common
(a prompt that has many answers) is there once: a mask lets each token see those before it in its
own sequences. Whether a model's class computes such rows right is tried.

Logits over a large vocabulary would need more memory than all else. Then the model runs in two
halves: hidden states first, and of these, a few at a time, logits, loss and gradient, of which only
that of the hidden states is kept.

The model stays in evaluation mode: it learns what it samples with, without dropout.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.terminal import say_once, show_bytes
from es_cookbook.engines.torch.forward.prefix_cache import num_common
from es_cookbook.engines.torch.memory import free_bytes, total_bytes
from es_cookbook.engines.torch.processor import products_of, rates
from es_cookbook.rl.rollouts import Example

OPTIMIZER = "optimizer.safetensors"
_FULL, _SLIDING = "full_attention", "sliding_attention"
LOGITS_AT_ONCE = 2**24
"""Most numbers."""
_ROOM = 1 / 40
"""Share of all memory for activations; what is free varies, and runs should come out the same."""
_FEW, MOST_TOKENS = 512, 16_384
"""Tokens of a pass: products of fewer are slow, of more not faster."""
_BYTES_OF_WEIGHT = 12
"""Its gradient, and two moments of AdamW."""
_BYTES_OF_LOGIT = 16
"""It, what it is normalised to, and the gradients of both."""
_WITH_BFLOAT16 = ("cpu", "cuda")
"""Kinds of devices; on others nobody has measured what gradients in it are worth."""
_ALIKE = 1e-3
"""Nats by which rounding may change a log-probability."""


Row: TypeAlias = Sequence[Example]
"""Sequences that go through the model as one, behind each other; one if they are not packed."""
Objective: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Log-probabilities now, when sampled, and weights -> what is maximised; one a learned token."""
_Tokens: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""For each learned token the row of what it follows from, and itself."""
_ToLogits: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Of what learned tokens follow from."""
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
        tokens_per_pass: most tokens, padding included, of one backward pass; None: those whose
            activations have room in a part of the device's memory.
        optimizers: made once, for all weights that learn.
        packed_length: most tokens of a row of several sequences; 0 packs none.
        products: dtype of matrix products; weights, sums of gradients and losses are float32.

    Attributes:
        packs: several sequences into a row, which the model's class has to allow.

    Raises:
        ConfigError: A name is no parameter's own, or a step does not fit into the free memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: Iterable[str],
        *,
        tokens_per_pass: int | None = None,
        optimizers: Optimizers = adamw,
        max_gradient_norm: float = 1.0,
        packed_length: int = 0,
        products: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.weights = trained_weights(model, names)
        self._max_gradient_norm = max_gradient_norm
        self._products = products
        self._halves = _Halves(model)
        self._packed_length, self._tokens_per_pass = packed_length, sys.maxsize
        self.packs = packed_length > 0 and self._can_pack()
        if not self.packs:
            self._packed_length = 0
        self._tokens_per_pass = self._room(tokens_per_pass)
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
            states_N_D, tokens, to_logits = self._origins(part)
            kept_N_D = states_N_D.detach().requires_grad_()
            sampled, weights, counts = torch.tensor(
                [_of_token(token) for token in learned_tokens(part)], device=kept_N_D.device
            ).T
            for logits_n_V, of_logits, which in self._logits(kept_N_D, tokens, to_logits):
                logprobs = _logprobs(logits_n_V, *of_logits)
                gained = objective(logprobs, sampled[which], weights[which]) * counts[which]
                gain = share * gained.sum()
                (-gain).backward()
                total += gain.item()
            states_N_D.backward(kept_N_D.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self._max_gradient_norm)
        for optimizer, factor in zip(self._optimizers, self._factors, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
            optimizer.step()
        return total, float(norm)

    def logprobs(self, examples: Sequence[Example]) -> list[tuple[float, ...]]:
        """Of each example's learned tokens, in order."""
        return self._by_example(examples, _logprobs)

    def entropies(self, examples: Sequence[Example]) -> list[tuple[float, ...]]:
        """In nats, of the distribution over all tokens that each learned one was drawn from."""

        def of_logits(logits: torch.Tensor, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return torch.special.entr(logits.softmax(dim=-1)).sum(dim=-1)[rows]

        return self._by_example(examples, of_logits)

    @torch.no_grad()
    def _by_example(
        self,
        examples: Sequence[Example],
        measure: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> list[tuple[float, ...]]:
        """A number for each learned token, of all parts; returns each example's, in order.

        `measure` is given some logits, and for each token its row of them and itself.
        """
        found: dict[int, list[float]] = {id(example): [] for example in examples}
        for part in self._parts(examples):
            states_N_D, tokens, to_logits = self._origins(part)
            numbers = torch.empty(len(tokens[0]), device=states_N_D.device)
            for logits_n_V, of_logits, which in self._logits(states_N_D, tokens, to_logits):
                numbers[which] = measure(logits_n_V, *of_logits)
            for (example, _), number in zip(learned_tokens(part), numbers.tolist(), strict=True):
                found[id(example)].append(number)
        return [tuple(found[id(example)]) for example in examples]

    def _can_pack(self) -> bool:
        """Whether no sequence sees others of its row, and the model takes a mask that says so."""
        own = [
            Example(tokens_T, (True,) * len(tokens_T))
            for tokens_T in ((3, 4, 5, 6, 7), (3, 4, 6, 5), (6, 3, 7))
        ]
        length, self._packed_length = self._packed_length, 0
        alone, self._packed_length = [*itertools.chain(*self.logprobs(own))], length
        try:
            together = [*itertools.chain(*self.logprobs(own))]
        except (KeyError, RuntimeError, TypeError, ValueError):
            return False
        return max(abs(a - b) for a, b in zip(alone, together, strict=True)) <= _ALIKE

    def _room(self, given: int | None) -> int:
        """Of a pass: those given, or whose activations have room; what does not fit is refused.

        If few have room, layers compute theirs again.
        """
        per_token = self._bytes_per_token()
        tokens = given
        if tokens is None:
            room = _ROOM * total_bytes(self.model.device)
            if room < _FEW * per_token:
                for layer in self._halves.layers():
                    again = functools.partial(checkpoint, layer.forward, use_reentrant=False)
                    layer.forward = again
                per_token = self._bytes_per_token()
            tokens = max(1, min(int(room / per_token), MOST_TOKENS))
        if self.weights:
            self._check_fits(min(tokens, MOST_TOKENS), per_token)
        return tokens

    def _check_fits(self, tokens: int, per_token: float) -> None:
        """Refuse, before anything is sampled, what would be killed in the first step."""
        free, numbers = free_bytes(self.model.device), sum(w.numel() for w in self.weights.values())
        states = _BYTES_OF_WEIGHT * numbers
        logits = _BYTES_OF_LOGIT * min(LOGITS_AT_ONCE, tokens * self._halves.vocabulary_size)
        if states + logits + tokens * per_token <= free:
            return
        fits = int((free - states - logits) / per_token)
        smaller = f"tokens_per_pass={fits}, " if fits >= 1 else ""
        raise ConfigError(
            f"a step does not fit into the {show_bytes(free)} of memory that are free on "
            f"{self.model.device.type}: gradients and moments of {numbers:,} weights need "
            f"{show_bytes(states)}, logits {show_bytes(logits)}, and activations of {tokens:,} "
            f"tokens (tokens_per_pass) {show_bytes(int(tokens * per_token))}; use {smaller}"
            "fewer weights (rank=8 of sft, trained=linear of policy_gradient), a smaller model, or "
            "a machine with more memory"
        )

    def _bytes_per_token(self) -> float:
        """What a backward pass needs of a forward pass, but for the weights."""
        own = {weight.untyped_storage().data_ptr() for weight in self.model.parameters()}

        def kept_of(size: int) -> int:
            kept: dict[int, int] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor.detach()  # with the output of a node itself it would live for ever

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                _held = self._origins([[Example((3,) * size, (False,) * (size - 1) + (True,))]])
            return sum(kept.values())

        few, more = 16, 80
        return max(1.0, (kept_of(more) - kept_of(few)) / (more - few))

    def _parts(self, examples: Sequence[Example]) -> list[list[Row]]:
        learned = [example for example in examples if any(example.learned_T[1:])]
        rows = (
            packed(learned, self._packed_length) if self._packed_length else [[e] for e in learned]
        )
        return in_parts(rows, self._tokens_per_pass)

    def _origins(self, part: Sequence[Row]) -> tuple[torch.Tensor, _Tokens, _ToLogits]:
        """What a part's learned tokens follow from, each once: logits, if few, or hidden states."""
        trees, device = [Tree.of(row) for row in part], self.model.device
        shape = len(trees), max(len(tree.tokens) for tree in trees)
        tokens_B_T, positions_B_T = torch.zeros(2, *shape, dtype=torch.long)
        for b, tree in enumerate(trees):
            tokens_B_T[b, : len(tree.tokens)] = torch.tensor(tree.tokens)
            positions_B_T[b, : len(tree.tokens)] = torch.tensor(tree.positions)
        how: dict[str, object] = {}
        if self._packed_length:
            sees_B_T_T = torch.eye(shape[1], dtype=torch.bool).repeat(shape[0], 1, 1)
            for sees_T_T, tree in zip(sees_B_T_T, trees, strict=True):
                for t, before in enumerate(tree.before):
                    if before is not None:
                        sees_T_T[t] |= sees_T_T[before]
            masks = self._halves.masks(sees_B_T_T.to(device), positions_B_T.to(device))
            how = {"position_ids": positions_B_T.to(device), "attention_mask": masks}
        is_small = tokens_B_T.numel() * self._halves.vocabulary_size <= LOGITS_AT_ONCE
        run = self._halves.whole if is_small else self._halves.hidden
        with self._computing():
            states_B_T_D = run(tokens_B_T.to(device), **how)
        places = [
            b * shape[1] + path[t - 1]
            for b, (row, tree) in enumerate(zip(part, trees, strict=True))
            for example, path in zip(row, tree.paths, strict=True)
            for t in learned_places(example)
        ]
        rows_of = {place: row for row, place in enumerate(sorted(set(places)))}
        chosen = torch.tensor(list(rows_of), device=device)
        rows = torch.tensor([rows_of[place] for place in places], device=device)
        learned = [example.tokens_T[t] for example, t in learned_tokens(part)]
        to_logits = _themselves if is_small else self._halves.logits
        tokens = rows, torch.tensor(learned, device=device)
        return states_B_T_D.flatten(0, 1)[chosen], tokens, to_logits

    def _logits(
        self, states_N_D: torch.Tensor, tokens: _Tokens, to_logits: _ToLogits
    ) -> Iterator[tuple[torch.Tensor, _Tokens, torch.Tensor]]:
        """Logits (n, V) of a few states at a time; what follows from them, and which that is."""
        rows, targets = tokens
        size = max(1, LOGITS_AT_ONCE // self._halves.vocabulary_size)
        firsts = range(0, len(states_N_D), size)
        for first, states_n_D in zip(firsts, states_N_D.split(size), strict=True):
            which = ((rows >= first) & (rows < first + size)).nonzero()[:, 0]
            with self._computing():
                logits_n_V = to_logits(states_n_D)
            yield logits_n_V.float(), (rows[which] - first, targets[which]), which

    def _computing(self) -> AbstractContextManager[object]:
        """Inside, products have their dtype."""
        is_lower = self._products != torch.float32
        return torch.autocast(self.model.device.type, self._products, enabled=is_lower)

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


def dtype_of_products(
    wanted: Literal["auto", "float32", "bfloat16"], base_dtype: str, device: torch.device
) -> torch.dtype:
    """What is wanted; auto: bfloat16 if the base is, and that is what the device is fastest in."""
    if wanted == "auto":
        is_fast = base_dtype == "bfloat16" and device.type in _WITH_BFLOAT16
        return products_of(torch.bfloat16, device) if is_fast else torch.float32
    if wanted == "bfloat16" and device.type == "cpu" and (slowdown := rates().slowdown) > 1:
        say_once(
            f"products=bfloat16: such products take {slowdown:.1f} times as long as those in "
            "float32 here; products=auto takes the faster"
        )
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def _themselves(logits_N_V: torch.Tensor) -> torch.Tensor:
    return logits_N_V


def _logprobs(logits_n_V: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits_n_V.log_softmax(dim=-1)[rows, tokens]


class _Halves:
    """A model as what makes hidden states, and what makes logits of them, scaled as it does."""

    def __init__(self, model: PreTrainedModel) -> None:
        # PEFT puts its layers into the model that it wraps.
        self._model = cast(Any, model).get_base_model() if hasattr(model, "peft_config") else model
        self._name = self._model.base_model_prefix
        self.vocabulary_size = int(self._model.config.get_text_config().vocab_size)

    def layers(self) -> Sequence[torch.nn.Module]:
        """The longest list of modules is that of the layers."""
        lists = (m for m in self._model.modules() if isinstance(m, torch.nn.ModuleList))
        return max(lists, key=len, default=())  # pyright: ignore[reportReturnType]

    def whole(self, tokens_B_T: torch.Tensor, **how: object) -> torch.Tensor:
        """Logits (B, T, V)."""
        return self._model(input_ids=tokens_B_T, use_cache=False, **how).logits

    def hidden(self, tokens_B_T: torch.Tensor, **how: object) -> torch.Tensor:
        """Hidden states (B, T, D)."""
        return getattr(self._model, self._name)(input_ids=tokens_B_T, use_cache=False, **how)[0]

    def masks(self, sees_B_T_T: torch.Tensor, positions_B_T: torch.Tensor) -> object:
        """What attention is told of which tokens see which, of each kind of layer."""
        config = self._model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ())
        ago_B_T_T = positions_B_T[:, :, None] - positions_B_T[:, None]

        def mask(within: int | None) -> torch.Tensor:
            seen = sees_B_T_T if within is None else sees_B_T_T & (ago_B_T_T < within)
            lowest = torch.finfo(self._model.dtype).min
            return torch.where(seen, 0.0, lowest)[:, None].to(self._model.dtype)

        if not kinds:
            return mask(window)
        masks = {kind: mask(window if kind == _SLIDING else None) for kind in kinds}
        return masks if len(masks) > 1 else mask(window if kinds == {_SLIDING} else None)

    def logits(self, hidden_N_D: torch.Tensor) -> torch.Tensor:
        """(N, V): the model's own, with its first half replaced by what that gave."""
        first = getattr(self._model, self._name)
        setattr(self._model, self._name, _Given(hidden_N_D.unsqueeze(0)))
        try:
            nothing = torch.zeros(1, len(hidden_N_D), dtype=torch.long, device=hidden_N_D.device)
            return self._model(input_ids=nothing, use_cache=False).logits[0]
        finally:
            setattr(self._model, self._name, first)


class _Given(torch.nn.Module):
    """Gives what it was made with, whatever it is asked."""

    def __init__(self, hidden_1_N_D: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden_1_N_D

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=cast(torch.FloatTensor, self._hidden))


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


@dataclasses.dataclass(frozen=True)
class Tree:
    """A row's sequences as the model reads them: what they begin with in common once.

    Attributes:
        tokens: read, with their `positions`, and the place of the one `before` each; None: the
            first of a sequence.
        paths: of each sequence, where its tokens are.
    """

    tokens: list[int]
    positions: list[int]
    before: list[int | None]
    paths: list[list[int]]

    @staticmethod
    def of(row: Row) -> "Tree":
        """Each sequence goes on where it leaves the one before it.

        >>> tree = Tree.of([Example((5, 6, 7), (True,) * 3), Example((5, 8, 9, 4), (True,) * 4)])
        >>> tree.tokens, tree.before, tree.paths
        ([5, 6, 7, 8, 9, 4], [None, 0, 1, 0, 3, 4], [[0, 1, 2], [0, 3, 4, 5]])
        """
        tree = Tree([], [], [], [])
        path, read = list[int](), tuple[int, ...]()
        for example in row:
            path, read = path[: num_common(read, example.tokens_T)], example.tokens_T
            for token in read[len(path) :]:
                tree.before.append(path[-1] if path else None)
                tree.positions.append(len(path))
                path.append(len(tree.tokens))
                tree.tokens.append(token)
            tree.paths.append(list(path))
        return tree


def learned_places(example: Example) -> list[int]:
    """Where its tokens that have a loss are; the first of all never has one."""
    return [t for t in range(1, len(example.tokens_T)) if example.learned_T[t]]


def learned_tokens(part: Sequence[Row]) -> Iterator[tuple[Example, int]]:
    """Every token that has a loss, row by row: its example, and its place there."""
    for example in itertools.chain(*part):
        for t in learned_places(example):
            yield example, t


def _of_token(token: tuple[Example, int]) -> tuple[float, float, float]:
    example, t = token
    return example.sampled_T[t] if example.sampled_T else 0.0, example.weight, float(example.count)


def length_of(row: Row) -> int:
    """Tokens that the model reads."""
    alike = (num_common(a.tokens_T, b.tokens_T) for a, b in itertools.pairwise(row))
    return sum(len(example.tokens_T) for example in row) - sum(alike)


def packed(examples: Sequence[Example], length: int) -> list[Row]:
    """Rows of at most so many tokens; a longer sequence has its own.

    Neighbours in the order of their tokens lie together, since they begin alike.

    >>> rows = packed([Example((n,) * n, (True,) * n) for n in (3, 6, 4, 5)], 7)
    >>> [[len(example.tokens_T) for example in row] for row in rows]
    [[3, 4], [5], [6]]
    """
    rows: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: example.tokens_T):
        if rows and length_of([*rows[-1], example]) <= length:
            rows[-1].append(example)
        else:
            rows.append([example])
    return list(rows)


def in_parts(rows: Sequence[Row], tokens_per_pass: int) -> list[list[Row]]:
    """Rows of similar length together, each part of so many tokens at most, padding included.

    The longest come first: what others need then fits into the memory that these have freed. What
    fits into one part keeps its order.

    >>> a, b, c = ([Example((1,) * n, (True,) * n)] for n in (3, 9, 4))
    >>> [[length_of(row) for row in part] for part in in_parts([a, b, c], 10)]
    [[9], [4, 3]]
    """
    if rows and len(rows) * max(map(length_of, rows)) <= tokens_per_pass:
        return [list(rows)]
    parts: list[list[Row]] = []
    for row in sorted(rows, key=length_of, reverse=True):
        if not parts or (len(parts[-1]) + 1) * length_of(parts[-1][0]) > tokens_per_pass:
            parts.append([])
        parts[-1].append(row)
    return parts
