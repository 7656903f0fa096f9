"""A Hugging Face model directory with some weights changed, for transformers and vLLM.

It has the same files as the base, each written tensor by tensor. Unchanged tensors are copied bit
for bit, except for quantised weights, which are dequantised as in the run. Dequantised and changed
tensors are rounded once, to the dtype that sampled: the base's own unless the run named another,
which `config.json` then names too. If the base's files have a separate tensor for a name that is
tied to a changed weight, it gets the same values.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch
from transformers import PreTrainedConfig

from es_cookbook.checkpoints.model_files import copy_file, find_file, tokenizer_files, weight_paths
from es_cookbook.checkpoints.models import first_names, load_architecture
from es_cookbook.checkpoints.quantised import QUANTISATION_FIELDS, quantised_checkpoint
from es_cookbook.checkpoints.tensors import (
    ReadTensors,
    TensorFile,
    TensorKind,
    dtype_name,
    weight_files,
)
from es_cookbook.common.errors import ModelError
from es_cookbook.common.files import LARGEST_CONFIG, LARGEST_TEXT, parsed, read_file

_ALSO_COPIED = ("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class BaseFiles:
    """The base's files, and the tensor of a file that each parameter is.

    Args:
        model_name: directory or Hub name.
        dtype: dtype of weights that are quantised or change.
        new: names and shapes of parameters that are added to it, 0 unless they change.
        config: config of the model with them, if there are any.

    Raises:
        ModelError: It cannot be read; says where.
    """

    def __init__(
        self,
        model_name: str,
        dtype: torch.dtype,
        new: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        config: PreTrainedConfig | None = None,
    ) -> None:
        self.model_name, self.dtype, self._config = model_name, dtype, config
        self._files = {_name_for(path): weight_files([path]) for path in weight_paths(model_name)}
        if (checkpoint := quantised_checkpoint(model_name)) is not None:
            self._files = {
                name: checkpoint.plain(files, dtype) for name, files in self._files.items()
            }
        name, last = self._files.popitem()
        self._files[name] = ReadTensors(
            dict.fromkeys((*last, *new)),
            lambda name: torch.zeros(new[name], dtype=dtype) if name in new else last[name],
        )
        self._parameter_of = first_names(load_architecture(model_name))
        self._places: dict[str, list[tuple[str, str]]] = {}
        for file_name, files in self._files.items():
            for name in files:
                parameter = self._parameter_of.get(name, name)
                self._places.setdefault(parameter, []).append((file_name, name))

    def have(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether each of these parameters is stored under its own name and shape."""
        return all(
            name in self._places and all(tuple(t.shape) == shape for t in self._stored(name))
            for name, shape in shapes.items()
        )

    def _stored(self, parameter: str) -> Iterator[torch.Tensor]:
        return (self._files[file_name][name] for file_name, name in self._places[parameter])

    def write_changed(
        self,
        directory: Path,
        names: Set[str] = frozenset(),
        changed: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        """Fill a directory with the base's config, tokenizer and weights.

        The parameters in `names`, which the files `have`, get the values in `changed`, float32, in
        any order, taken one at a time.

        Raises:
            ModelError: A changed weight is not stored as plain numbers.
            OSError: It cannot be written.
        """
        as_stored = {tensor.dtype for name in names for tensor in self._stored(name)}
        if quantised := [d for d in as_stored if not d.is_floating_point or d.itemsize < 2]:
            raise ModelError(
                f"model_name: {self.model_name!r} stores weights that change as {quantised[0]}, "
                "and only float64, float32, float16 and bfloat16 can be replaced"
            )
        self._copy_small_files(directory, as_stored)
        weight_map: dict[str, str] = {}
        total_size = 0
        with contextlib.ExitStack() as stack:
            written: dict[str, TensorFile] = {}
            for file_name, files in self._files.items():
                kinds: dict[str, TensorKind] = {}
                for name in files:
                    stays = self._parameter_of.get(name, name) not in names
                    tensor = files[name]
                    kinds[name] = (tensor.dtype if stays else self.dtype, tuple(tensor.shape))
                    total_size += tensor.numel() * kinds[name][0].itemsize
                    weight_map[name] = file_name
                written[file_name] = stack.enter_context(TensorFile(directory / file_name, kinds))
                for name in files:
                    if self._parameter_of.get(name, name) not in names:
                        written[file_name].write(name, files[name])
            for parameter, tensor in changed:
                for file_name, name in self._places[parameter]:
                    written[file_name].write(name, tensor)
        if list(self._files) != [_ONE_FILE]:
            self._write_index(directory, total_size, weight_map)

    def _write_index(self, directory: Path, total_size: int, weight_map: Mapping[str, str]) -> None:
        metadata: dict[str, object] = {}
        if path := find_file(self.model_name, _INDEX):
            index = cast("dict[str, object]", parsed(read_file(path, LARGEST_TEXT, None)))
            found = index.get("metadata")
            metadata = cast("dict[str, object]", found) if isinstance(found, dict) else {}
        metadata["total_size"] = total_size
        whole = {"metadata": metadata, "weight_map": weight_map}
        _write_json(directory / _INDEX, whole, sort_keys=True)  # as transformers does

    def _copy_small_files(self, directory: Path, as_stored: Set[torch.dtype]) -> None:
        also = [path for name in _ALSO_COPIED if (path := find_file(self.model_name, name))]
        for path in (*tokenizer_files(self.model_name), *also):
            copy_file(path, directory)
        path = find_file(self.model_name, "config.json")
        assert path is not None, "the architecture was loaded from it"
        text = read_file(path, LARGEST_CONFIG, None)
        if self._config is not None:
            text = self._config.to_json_string().encode()
        config = cast("dict[str, object]", parsed(text))
        named = config.pop("torch_dtype", None)  # its name before transformers 5
        named = config.get("dtype", named)
        sampled = dtype_name(self.dtype)
        quantised = [config.pop(key) for key in QUANTISATION_FIELDS if key in config]
        is_same = named == sampled or (named is None and as_stored == {self.dtype})
        if is_same and not quantised and self._config is None:
            copy_file(path, directory)
        else:
            _write_json(directory / path.name, config | {"dtype": sampled})


def _name_for(path: Path) -> str:
    """Return the name of the safetensors file that replaces one of the base's files."""
    if path.suffix == ".safetensors":
        return path.name
    return path.with_suffix(".safetensors").name.replace("pytorch_model", "model", 1)


def _write_json(path: Path, value: Mapping[str, object], sort_keys: bool = False) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=sort_keys)
    path.write_text(f"{text}\n", encoding="utf-8")
