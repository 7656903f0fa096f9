"""A model that learns from token sequences: log-probabilities, optimizer steps and their files.

All gradient training here is `Learner.step`: supervised fine-tuning, the bundled small models, and
policy gradients.

Sequences are padded on the right, where no real token attends to the padding, so any token can be
padding, and a tokenizer needs no padding token. A batch that is too large for one pass is split
into parts of similar length whose gradients are added: parts change memory and speed only. A prompt
with many answers is a part that reads it once: its keys and values are those of all answers, and
get the sum of their gradients. Whether a model's class computes that right is tried.

Logits over a large vocabulary would need more memory than everything else. So the model runs in
two halves: first the hidden states; then, for a few of these at a time, logits, loss and gradient,
where only the gradient of the hidden states is kept.

The model stays in evaluation mode: it learns without dropout, as it samples.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutputWithPast

from es_cookbook.checkpoints.models import Vocabulary
from es_cookbook.common.errors import (
    ConfigError,
    DataError,
    DivergedError,
    ModelError,
    RunDirectoryError,
)
from es_cookbook.engines.torch.kernels.products import products_of
from es_cookbook.engines.torch.memory import total_bytes
from es_cookbook.rl.rollouts import Example

OPTIMIZER = "optimizer.safetensors"
LOGITS_AT_ONCE = 2**24
"""Maximum number of elements."""
_ROOM = 1 / 10
"""Share of total memory for activations; free memory varies, and runs should be reproducible."""
MOST_TOKENS = 16_384
"""Tokens of a pass; products of more are not faster."""
WORTH_A_PASS = 256
"""Tokens of prompts that are not read again, above which a prompt has a pass of its own."""
_WITH_BFLOAT16 = ("cpu", "cuda")
"""Kinds of devices on which gradients in bfloat16 have been measured."""
Objective: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Log-probabilities now, when sampled, and weights -> the objective per learned token."""
Optimizers: TypeAlias = Callable[
    [Mapping[str, torch.nn.Parameter]], Sequence[torch.optim.Optimizer]
]
"""Trained weights by name -> their optimizers, whose `lr` is a factor on each step's rate."""


def adamw(
    weights: Mapping[str, torch.nn.Parameter], weight_decay: float = 0.0
) -> Sequence[torch.optim.Optimizer]:
    return [torch.optim.AdamW(weights.values(), lr=1.0, weight_decay=weight_decay)]


class Learner:
    """A model, some of whose weights are trained.

    Args:
        model: its parameters do not require gradients.
        names: names of the parameters to train.
        tokens_per_pass: maximum tokens, including padding, of one backward pass; None: as many as
            have room in a share of the device's memory.
        optimizers: makes the optimizers of the trained weights.
        products: dtype of matrix products; weights, gradient sums and losses are float32.

    Raises:
        ConfigError: There is no parameter of such a name, or the model has an unusual head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: Iterable[str],
        *,
        tokens_per_pass: int | None = None,
        optimizers: Optimizers = adamw,
        max_gradient_norm: float = 1.0,
        products: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.weights = trained_weights(model, names)
        self._most_tokens = most_tokens(model)
        self._max_gradient_norm = max_gradient_norm
        self._products = products
        self._halves = _Halves(model)
        self._halves.check()
        self._shares = self._halves.reads_prompts_once([*self.weights.values()])
        if tokens_per_pass is None:
            room = _ROOM * total_bytes(model.device) / _bytes_per_token(model)
            tokens_per_pass = max(1, min(int(room), MOST_TOKENS))
        self._tokens_per_pass = tokens_per_pass
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
        """Take one ascent step on the objective's sum over learned tokens, times `share`.

        Returns:
            The value that was maximised, before the step, and the gradient norm before clipping.

        Raises:
            DivergedError: One of them is not finite.
        """
        for weight in self.weights.values():
            weight.grad = None
        total = 0.0
        with self._computing():
            for part in self._parts(examples):
                states_N_D, tokens_N, numbers_3_N = self._origins(part)
                kept_N_D = states_N_D.detach().requires_grad_()
                sampled, weights, counts = numbers_3_N
                for logits_n_V, which in self._logits(kept_N_D):
                    logprobs = _logprobs(logits_n_V, tokens_N[which])
                    gained = objective(logprobs, sampled[which], weights[which]) * counts[which]
                    gain = share * gained.sum()
                    (-gain).backward()
                    total += gain.item()
                states_N_D.backward(kept_N_D.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self._max_gradient_norm)
        if not math.isfinite(total + float(norm)):
            raise DivergedError(
                "training has diverged: the loss or its gradient is not finite; lower learning_rate"
            )
        for optimizer, factor in zip(self._optimizers, self._factors, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * factor
            optimizer.step()
        return total, float(norm)

    @torch.no_grad()
    def logprobs(self, examples: Sequence[Example]) -> list[tuple[float, ...]]:
        """Return the log-probabilities of each example's learned tokens."""
        found: dict[int, tuple[float, ...]] = {}
        with self._computing():
            for part in self._parts(examples):
                states_N_D, tokens_N, _ = self._origins(part)
                logprobs_N = torch.empty(len(tokens_N), device=states_N_D.device)
                for logits_n_V, which in self._logits(states_N_D):
                    logprobs_N[which] = _logprobs(logits_n_V, tokens_N[which])
                told = iter(logprobs_N.tolist())
                for example in part:
                    found[id(example)] = tuple(islice(told, len(learned_places(example))))
        return [found.get(id(example), ()) for example in examples]

    def _parts(self, examples: Sequence[Example]) -> list[list[Example]]:
        learned = [example for example in examples if any(example.learned_T[1:])]
        longest = max((len(example.tokens_T) for example in learned), default=0)
        if longest > self._most_tokens:
            raise DataError(
                f"a prompt and its answer have {longest} tokens, and the model's context "
                f"{self._most_tokens}: shorten the answers, or leave out those that are too long"
            )
        with_prompt: dict[tuple[int, ...], list[Example]] = {}
        for example in learned:
            with_prompt.setdefault(_prompt(example) if self._shares else (), []).append(example)
        alone: list[Example] = []
        parts: list[list[Example]] = []
        for prompt_T, answers in with_prompt.items():
            if (len(answers) - 1) * len(prompt_T) < WORTH_A_PASS:
                alone += answers
            else:
                parts += in_parts(answers, self._tokens_per_pass, len(prompt_T))
        return parts + in_parts(alone, self._tokens_per_pass)

    def _origins(self, part: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden states that predict the learned tokens, their ids, and three numbers.

        The numbers are the log-probability at sampling, the weight and the count.
        """
        device, prompts = self.model.device, {_prompt(example) for example in part}
        is_shared = self._shares and len(prompts) == 1 < len(part)
        prompt_T = prompts.pop() if is_shared else ()
        start = len(prompt_T)
        rows = [torch.tensor(example.tokens_T[start:]) for example in part]
        tokens_B_T = pad_sequence(rows, batch_first=True)
        length = tokens_B_T.shape[1]
        states_B_T_D = self._halves.hidden(tokens_B_T.to(device), prompt_T)
        learned = [(b, t) for b, example in enumerate(part) for t in learned_places(example)]
        chosen = torch.tensor([b * length + t - 1 - start for b, t in learned], device=device)
        ids = torch.tensor([part[b].tokens_T[t] for b, t in learned], device=device)
        numbers = [
            (part[b].sampled_T[t] if part[b].sampled_T else 0.0, part[b].weight, part[b].count)
            for b, t in learned
        ]
        return states_B_T_D.flatten(0, 1)[chosen], ids, torch.tensor(numbers, device=device).T

    def _logits(self, states_N_D: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield logits (n, V) of a few states at a time, with their slice."""
        size = max(1, LOGITS_AT_ONCE // self._halves.vocabulary_size)
        for first in range(0, len(states_N_D), size):
            which = slice(first, first + size)
            yield self._halves.logits(states_N_D[which]).float(), which

    def _computing(self) -> AbstractContextManager[object]:
        """Return a context manager for all passes of a step, in which weights are cast once."""
        is_lower = self._products != torch.float32
        return torch.autocast(self.model.device.type, self._products, enabled=is_lower)

    def save_moments(self, directory: Path) -> None:
        """Write the state of the optimizers; the weights are in the model's files."""
        tensors = {
            f"{name}/{moment}": value.contiguous()
            for name, weight in self.weights.items()
            for moment, value in self._states[name].get(weight, {}).items()
        }
        save_file(tensors, directory / OPTIMIZER)

    def load_moments(self, directory: Path) -> None:
        """Load the file that `save_moments` wrote.

        Raises:
            RunDirectoryError: It is damaged or belongs to other weights.
        """
        try:
            for key, value in load_file(directory / OPTIMIZER).items():
                name, _, moment = key.rpartition("/")
                weight = self.weights[name]
                device = "cpu" if moment == "step" else weight.device
                self._states[name][weight][moment] = value.to(device)
        except (OSError, KeyError, RuntimeError) as error:
            raise RunDirectoryError(
                f"{directory} is not a checkpoint of this run: {type(error).__name__}: {error}"
            ) from error


def _bytes_per_token(model: PreTrainedModel) -> int:
    """Estimate the bytes that a forward pass keeps for the backward pass, in float32."""
    text = model.config.get_text_config()
    width = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * width)
    return 4 * int(text.num_hidden_layers) * (10 * width + 4 * inner)


def dtype_of_products(
    wanted: Literal["auto", "float32", "bfloat16"], base_dtype: str, device: torch.device
) -> torch.dtype:
    """Return the dtype of products; auto: bfloat16 if the base is and it is fastest."""
    if wanted == "auto":
        is_fast = base_dtype == "bfloat16" and device.type in _WITH_BFLOAT16
        return products_of(torch.bfloat16, device) if is_fast else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def _logprobs(logits_n_V: torch.Tensor, tokens_n: torch.Tensor) -> torch.Tensor:
    return logits_n_V.log_softmax(dim=-1).gather(1, tokens_n[:, None])[:, 0]


class _Halves:
    """A model in two halves: hidden states, and their logits, scaled as the model scales them."""

    def __init__(self, model: PreTrainedModel) -> None:
        # PEFT inserts its layers into the model that it wraps.
        self._model = cast(Any, model).get_base_model() if hasattr(model, "peft_config") else model
        self._name = self._model.base_model_prefix
        self.vocabulary_size = int(self._model.config.get_text_config().vocab_size)

    def hidden(self, tokens_B_T: torch.Tensor, prompt_T: Sequence[int] = ()) -> torch.Tensor:
        """Return hidden states (B, T, D) of tokens behind a prompt, which is read once."""
        first = getattr(self._model, self._name)
        if not prompt_T:
            return first(input_ids=tokens_B_T, use_cache=False)[0]
        prompt_1_T = torch.tensor([prompt_T], device=tokens_B_T.device)
        cache = DynamicCache(config=self._model.config)
        first(input_ids=prompt_1_T, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(tokens_B_T))
        return first(input_ids=tokens_B_T, past_key_values=cache, use_cache=True)[0]

    def logits(self, hidden_N_D: torch.Tensor) -> torch.Tensor:
        """Return logits (N, V) of given hidden states, as the model computes them."""
        first = getattr(self._model, self._name)
        setattr(self._model, self._name, _Given(hidden_N_D.unsqueeze(0)))
        try:
            nothing = torch.zeros(1, len(hidden_N_D), dtype=torch.long, device=hidden_N_D.device)
            return self._model(input_ids=nothing, use_cache=False).logits[0]
        finally:
            setattr(self._model, self._name, first)

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model whose logits do not follow from its hidden states.

        Raises:
            ConfigError: Names its class.
        """
        token = torch.zeros(1, 1, dtype=torch.long, device=self._model.device)
        try:
            whole = self._model(input_ids=token, use_cache=False).logits[0]
            is_same = torch.allclose(self.logits(self.hidden(token)[0]), whole, 1e-3, 1e-3)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            is_same = False
        if not is_same:
            raise ConfigError(
                f"{type(self._model).__name__} cannot be trained by gradients here: its logits "
                "are not made of its last hidden states alone"
            )

    @torch.enable_grad()
    def reads_prompts_once(self, weights: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether answers behind a prompt that is read once have their states, gradient too.

        Not so, for example, with layers that keep a state in place of keys and values.
        """
        # Classes warn of padding.
        padding = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        some = [t for t in range(min(32, self.vocabulary_size)) if t != padding] * 30
        tokens_B_T = torch.tensor(some[:30], device=self._model.device).view(2, 15)
        tokens_B_T[1, :10] = tokens_B_T[0, :10]
        few = sorted(weights, key=torch.numel)[:1]
        try:
            found, expected = (
                (states, *torch.autograd.grad(states[..., 0].sum(), few, materialize_grads=True))
                for states in (
                    self.hidden(tokens_B_T[:, 10:], tokens_B_T[0, :10].tolist()),
                    self.hidden(tokens_B_T)[:, 10:],
                )
            )
            return all(
                torch.allclose(one, other, 1e-3, 1e-3 * other.detach().abs().max().item())
                for one, other in zip(found, expected, strict=True)
            )
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False


class _Given(torch.nn.Module):
    """Returns the given hidden states for any input."""

    def __init__(self, hidden_1_N_D: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden_1_N_D

    def forward(self, *_: object, **__: object) -> "_Outputs":
        return _Outputs(last_hidden_state=cast(torch.FloatTensor, self._hidden))


class _Outputs(BaseModelOutputWithPast):
    """Hidden states alone: all else that some heads pass on is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def trained_weights(model: PreTrainedModel, names: Iterable[str]) -> dict[str, torch.nn.Parameter]:
    """Return the named parameters, which require gradients from now on.

    Raises:
        ConfigError: There is no parameter of such a name.
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


def learned_places(example: Example) -> list[int]:
    """Return positions of tokens that have a loss; the first token never has one."""
    return [t for t in range(1, len(example.tokens_T)) if example.learned_T[t]]


def most_tokens(model: PreTrainedModel) -> int:
    """Return the context of a model, for which its positions are made; very large if unknown."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None) or -1
    return int(found) if found > 0 else 2**31  # -1 is XLNet's value for no limit.


def _prompt(example: Example) -> tuple[int, ...]:
    """Return the tokens before the one that the first learned token follows."""
    return tuple(example.tokens_T[: learned_places(example)[0] - 1])


def in_parts(
    examples: Sequence[Example], tokens_per_pass: int, num_shared: int = 0
) -> list[list[Example]]:
    """Group sequences of similar length, with at most so many padded tokens a part.

    Each part reads their first `num_shared` tokens once.

    The longest come first, so that later parts fit into the memory that these have freed. If all
    fit into one part, their order is kept.

    >>> a, b, c = (Example((1,) * n, (True,) * n) for n in (3, 9, 4))
    >>> [[len(example.tokens_T) for example in part] for part in in_parts([a, b, c], 10)]
    [[9], [4, 3]]
    """

    def length(example: Example) -> int:
        return len(example.tokens_T) - num_shared

    room = tokens_per_pass - num_shared
    if examples and len(examples) * max(map(length, examples)) <= room:
        return [list(examples)]
    parts: list[list[Example]] = []
    for example in sorted(examples, key=length, reverse=True):
        if not parts or (len(parts[-1]) + 1) * length(parts[-1][0]) > room:
            parts.append([])
        parts[-1].append(example)
    return parts


_LOW = -1e4
"""A bias that rules a token out, also after the model scales its logits."""


def learn_tokens_alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Exclude rows without a token from a model's logits, as engines do, by the head's bias.

    The bias is also read by code that computes logits from the head's weight. A head without one
    gets a buffer in its place, so the model's parameters and files do not change.

    Raises:
        ModelError: The model has such rows, and its head is not a linear layer.
    """
    never = Vocabulary(model, tokenizer).never
    head = cast("torch.nn.Module", model.get_output_embeddings())
    if not never:
        return
    if type(head) is not torch.nn.Linear:
        raise ModelError(
            f"its head is a {type(head).__name__}, in which {len(never):,} rows without a token "
            "cannot be excluded; accepted: a linear layer"
        )
    if getattr(head, "bias", None) is None:
        del head.bias
        head.register_buffer("bias", head.weight.new_zeros(head.out_features), persistent=False)
    with torch.no_grad():
        head.bias[sorted(never)] = _LOW
