"""What a model keeps of the tokens it has seen: how many bytes, and for how long.

Found by running a few tokens through a copy of the model, of a large one without weights or results
(on torch's "meta" device), so it costs no time at any size.
"""

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from es_cookbook.engines.torch.forward.attention import round_up, set_attention, unknown_option
from es_cookbook.engines.torch.forward.own import Unfit, bytes_of_cache
from es_cookbook.engines.torch.forward.path import Path
from es_cookbook.engines.torch.kernels.attention import STEP

_PROBE = "es_cookbook_probe"
_SHORT, _LONG = 16, 32
_SMALL = 1 << 22
"""Parameters up to which weights cost less than torch's detours on "meta"."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSize:
    """Bytes of one request: `fixed`, and `per_token` for each of its tokens."""

    fixed: int
    per_token: int

    def of(self, num_tokens: int) -> int:
        """Bytes of a request of so many tokens."""
        return self.fixed + self.per_token * num_tokens


class _Noted(threading.local):
    """What attention layers asked for in the run of this thread: keys, values, window and mask."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, torch.Tensor, torch.Tensor, int | None, object]] = []


_noted = _Noted()


_Mask: TypeAlias = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""In place of a mask: which positions (batch, head, query, key) see each other."""


def _make_mask(*_: object, mask_function: object = None, **__: object) -> object:
    return mask_function


def _probe(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attention that only notes what a token needs. As in `population_layers`."""
    if (name := unknown_option(options)) is not None:
        raise Unfit(f"its attention takes {name}")
    index = cast("int", module.layer_idx)
    like = key.to("meta"), value.to("meta")
    _noted.layers.append((index, *like, sliding_window, attention_mask))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(_PROBE, _probe)
AttentionMaskInterface.register(_PROBE, _make_mask)


def flat_cache_size(
    model: PreTrainedModel,
    context_length: int,
    layers: Sequence[int] | None = None,
    *,
    on_cpu: bool = False,
) -> CacheSize:
    """Keys and values over all layers, of a model whose attention can be replaced.

    Args:
        model: is not changed.
        context_length: over which attention has to be causal.
        layers: of which layer of `model` each one is like, where it is the beginning of a larger
            model; None if it is all of it.
        on_cpu: whether the cache will be there, as the kernel wants it.

    Raises:
        Unfit: It cannot: the model has no hook for it, or asks for more than a window.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise Unfit("it has no attention hook in transformers")
    try:
        _run_probe(_quick_copy(model))
    except Unfit:
        raise
    except Exception:  # what looks at values, as a router does, cannot be run without
        _run_probe(_with_weights(model))
    noted, _noted.layers = _noted.layers, []
    if not noted:
        raise Unfit("it does not use its attention hook")
    for *_, window, mask in noted:
        if isinstance(mask, torch.Tensor):
            raise Unfit("it makes its own mask")
        if callable(mask) and not _is_causal(cast(_Mask, mask), window, context_length):
            raise Unfit("its attention looks back otherwise than over a window")
    bytes_of_layer = {i: _bytes_of_token(key, value, on_cpu) for i, key, value, *_ in noted}
    if layers is None:
        return CacheSize(0, sum(bytes_of_layer.values()))
    return CacheSize(0, sum(bytes_of_layer.get(layer, 0) for layer in layers))


def _bytes_of_token(key: torch.Tensor, value: torch.Tensor, on_cpu: bool) -> int:
    """Of one token's keys and values, (1, kv heads, tokens, d) each, as the cache has them."""
    columns = round_up(value.shape[3], STEP) if on_cpu else value.shape[3]
    elements = key[0, :, 0].numel() + value.shape[1] * columns
    return elements * (torch.float32.itemsize if on_cpu else key.element_size())


def _run_probe(probe: PreTrainedModel) -> None:
    set_attention(probe, _PROBE)
    _noted.layers = []
    tokens = torch.zeros(1, _SHORT, dtype=torch.int64, device=probe.device)
    # Without a mask, transformers would look at the values of positions.
    probe(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


def own_cache_size(model: PreTrainedModel, path: Path) -> CacheSize:
    """What the model's own cache grows to; without one, what running a token again takes."""
    if not path.cached:
        hidden = cast("nn.Embedding", model.get_input_embeddings()).weight.shape[1]
        return CacheSize(0, 16 * hidden * model.dtype.itemsize)
    try:
        probe = _quick_copy(model)
        # A mask is looked at, and makes no difference to how much is kept.
        alone = dataclasses.replace(path, padded=False)
        short, long = (bytes_of_cache(probe, alone, n) for n in (_SHORT, _LONG))
    except Unfit:
        raise
    except Exception:  # what looks at values cannot be run without
        probe = _with_weights(model)
        short, long = (bytes_of_cache(probe, path, n) for n in (_SHORT, _LONG))
    per_token = max(1, -(-(long - short) // (_LONG - _SHORT)))
    return CacheSize(max(0, short - per_token * _SHORT), per_token)


def _quick_copy(model: PreTrainedModel) -> PreTrainedModel:
    """What a few tokens run through quickly, at any size."""
    if model.num_parameters() <= _SMALL:
        return _with_weights(model)
    memo: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _with_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Modules of their own, to leave whatever they like in, around the same weights."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


def _is_causal(mask: _Mask, window: int | None, context_length: int) -> bool:
    """Whether a mask is that of a causal window, for queries over the whole context."""
    for at in {context_length - 1, context_length // 2, 0}:
        query, key = torch.tensor(at), torch.arange(context_length)
        seen = (key <= at) & (key > at - window if window else True)
        if not torch.equal(mask(0, 0, query, key).expand_as(seen), seen):
            return False
    return True
