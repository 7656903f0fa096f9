"""The base model's parameters, one at a time, as an engine held them: read, and cast to its dtype.

A parameter is looked up in the checkpoint under its own name, or under another that is tied to it.
Where the checkpoint stores the model otherwise (some architectures fuse or rename on loading),
transformers loads all of it, as an engine does, and then it does take the memory of the model.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import cast

import torch
from transformers import PreTrainedModel

from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.checkpoints.weights import WeightFiles, weight_files


class BaseParameters(Mapping[str, torch.Tensor]):
    """The base model's parameters by name, read when asked for. Threads may share it.

    Args:
        model_name: directory or Hub name.
        architecture: the model without weights.
        names: parameters that will be asked for.
        dtype: that the engine held them in: "auto" for the checkpoint's own, or a dtype's name.

    Attributes:
        dtype: that the engine held them in.

    Raises:
        ModelError: The checkpoint cannot be read.
    """

    def __init__(
        self, model_name: str, architecture: PreTrainedModel, names: Collection[str], dtype: str
    ) -> None:
        files = weight_files(model_name)
        self.dtype = _held_dtype(architecture, files) if dtype == "auto" else _named(dtype)
        self._source: Mapping[str, torch.Tensor] = files
        parameters = dict(architecture.named_parameters(remove_duplicate=False))
        stored_as: dict[int, str] = {}
        for name, parameter in parameters.items():
            if name in files:
                stored_as.setdefault(id(parameter), name)
        self._stored = {name: stored_as.get(id(parameters[name]), name) for name in names}
        if any(
            stored not in files or files[stored].shape != parameters[name].shape
            for name, stored in self._stored.items()
        ):
            model = load_causal_lm(model_name, dtype, torch.device("cpu"))
            self._source = dict(model.named_parameters())
            self._stored = {name: name for name in names}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[self._stored[name]].detach().to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def _held_dtype(architecture: PreTrainedModel, files: WeightFiles) -> torch.dtype:
    """What transformers makes of "auto": the config's, or that of the first weight there is."""
    configured = cast("torch.dtype | None", architecture.config.dtype)
    if configured is not None:
        return configured
    dtypes = (tensor.dtype for tensor in files.values())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _named(dtype: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, dtype))
