"""The weights of a GGUF file, dequantised a few rows at a time: memory holds one tensor.

Left out: architectures other than those of `names.py`, which transformers converts as a whole.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from es_cookbook.checkpoints.tensors import TensorFile
from es_cookbook.plugins.gguf.header import Header, Tensor, import_gguf, refused
from es_cookbook.plugins.gguf.names import ARCHITECTURES, as_transformers, renaming

_AT_ONCE = 2**22
"""Numbers that are dequantised together."""


def is_known(header: Header, model: PreTrainedModel) -> bool:
    """Return whether a file's names of weights and orders of values are known here."""
    return ARCHITECTURES.get(model.config.model_type) == header.metadata["general.architecture"]


def write_weights(path: Path, header: Header, model: PreTrainedModel, file: Path) -> None:
    """Write a file's weights as safetensors, in the header's dtype.

    Args:
        path: the GGUF file.
        header: its header.
        model: the model without its weights.
        file: is written.

    Raises:
        ModelError: It lacks weights, or has some that are not finite.
    """
    dtype: torch.dtype = getattr(torch, header.dtype)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    rename = renaming(model.config)
    if missing := sorted(name for name in shapes if rename(name) not in header.tensors):
        raise refused(path, f"lacks weights: {missing[0]} and {len(missing) - 1} more")
    with TensorFile(file, {name: (dtype, shape) for name, shape in shapes.items()}) as written:
        for name in shapes:
            tensor = _dequantised(path, header.tensors[rename(name)], dtype)
            if tensor is None:
                raise refused(path, f"has numbers that are not finite, in {name}")
            written.write(name, as_transformers(name, tensor, model.config))


def _dequantised(path: Path, tensor: Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a matrix in this dtype, a vector in float32; None if a number is not finite."""
    gguf = import_gguf()
    kind, columns = gguf.GGMLQuantizationType(tensor.type), tensor.shape[0]
    # An offset is subtracted from a vector before that is rounded.
    result_dtype = dtype if len(tensor.shape) > 1 else torch.float32
    result = torch.empty(tensor.shape[::-1], dtype=result_dtype)
    rows = result.view(-1, columns)
    stored = np.memmap(path, np.uint8, "r", tensor.start, (tensor.size,)).reshape(len(rows), -1)
    at_once = max(1, _AT_ONCE // columns)
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        rows[part] = torch.tensor(gguf.dequantize(stored[part], kind))
        if not rows[part].to(dtype).isfinite().all():
            return None
    return result
