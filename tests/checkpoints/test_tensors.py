"""Files written tensor by tensor are those that the library itself writes."""

import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save, save_file

from es_cookbook.checkpoints.tensors import TensorFile, leave_in_files, weight_files

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


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps tells what may go")
def test_tensors_in_mapped_files_give_their_memory_back_unless_they_were_changed(
    tmp_path: Path,
) -> None:
    def in_files() -> int:
        return psutil.Process().memory_info().shared

    size = 1 << 22
    for name in ("same", "changed"):
        save_file({name: torch.arange(size).float()}, tmp_path / f"{name}.safetensors")
    files = weight_files(tmp_path.glob("*.safetensors"))
    before, own, same, changed = in_files(), torch.ones(size), files["same"], files["changed"]
    total = same.double().sum() + changed.double().sum()
    assert in_files() - before > 1.9 * same.nbytes, "both were read"
    changed[size // 2] += 1
    read = in_files()
    leave_in_files([own, same, changed])
    assert same.nbytes * 0.9 < read - in_files() < same.nbytes * 1.1
    assert own.sum() == size
    assert same.double().sum() + changed.double().sum() == total + 1
