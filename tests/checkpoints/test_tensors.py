"""Files written tensor by tensor are those that the library itself writes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from es_cookbook.checkpoints.tensors import TensorFile

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def test_it_is_the_librarys_own_file_byte_for_byte(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"{i}.{name}": (torch.randn(shape) * 9).to(dtype)
        for i, dtype in enumerate(DTYPES)
        for name, shape in (("ü", (3, 5)), ("scalar", ()), ("none", (0, 4)))
    }
    tensors["turned"] = torch.randn(4, 6).T
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorFile(tmp_path / "file", kinds) as file:
        for name in reversed(tensors):
            file.write(name, tensors[name])
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert (tmp_path / "file").read_bytes() == save(contiguous, {"format": "pt"})


def test_missing_tensors_and_other_shapes_are_refused(tmp_path: Path) -> None:
    kinds = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with (
        pytest.raises(ValueError, match="b was announced and never written"),
        TensorFile(tmp_path / "missing", kinds) as file,
    ):
        file.write("a", torch.ones(2))
    with (
        pytest.raises(ValueError, match=r"a was announced as \(2,\), found \(3,\)"),
        TensorFile(tmp_path / "shape", kinds) as file,
    ):
        file.write("a", torch.ones(3))
