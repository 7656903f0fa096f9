"""Loops that numba compiles for the CPU: machine code without the interpreter's lock.

numba keeps machine code in files and runs what it finds there. Here each file begins with a digest
of the rest, so that a damaged one is compiled again.
"""

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding
from numba.core import caching, config, event, typeinfer

from es_cookbook.common.terminal import say

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def features() -> str:
    """Return the processor's features that loops may use, as LLVM writes them: "+avx2,-avx512f".

    `NUMBA_CPU_FEATURES` sets them. `ATEN_CPU_CAPABILITY=avx2`, which holds torch to AVX2, holds
    loops to it as well.
    """
    given = cast(Any, config).CPU_FEATURES
    if isinstance(given, str):
        return given
    try:
        found = binding.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM does not know all processors' features; then it takes the least
        found = ""
    is_held = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
    return found.replace("+avx512", "-avx512") if is_held else found


cast(Any, config).CPU_FEATURES = features()  # read when the first loop is compiled


def compiled(
    signature: object, version: str = "", *, fastmath: bool = False
) -> Callable[[_Loop], _Loop]:
    """Compile a function when its module is imported, and keep it on disk for the next process.

    Without fast-math flags LLVM neither fuses a product with a sum nor reorders sums: the bits are
    those that the source says, on every processor.

    Args:
        signature: types of the arguments, in numba's words or as its types.
        version: version of what the loop uses from outside its module, whose changes numba would
            not see: it keeps machine code by the module's own time and the function's name.
        fastmath: LLVM flags, for sums whose bits need not be the same everywhere.
    """
    how = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}

    def decorate(loop: _Loop) -> _Loop:
        if version:
            loop.__qualname__ += f"_{version}"
        with event.install_listener("numba:compile", _announcement):
            try:
                dispatcher = cast(Any, numba.njit(**how)(loop))
                dispatcher._cache = _CheckedCache(loop)
                with typeinfer.register_dispatcher(dispatcher):  # As `njit` does with a signature.
                    for each in signature if isinstance(signature, list) else [signature]:
                        dispatcher.compile(each)
                    dispatcher.disable_compile()
                return cast("_Loop", dispatcher)
            except RuntimeError:  # neither this package's folder nor the user's can be written
                _announcement.when = "each time, since no folder for them can be written"
                return cast("_Loop", numba.njit(signature, **how)(loop))

    return decorate


class _CheckedFile(cast(Any, caching).IndexDataCacheFile):
    """The index and the machine code of a loop, each after the digest of its bytes."""

    def _load_index(self) -> object:
        try:
            found = _read(Path(self._index_path))
            version, stamp, overloads = cast("tuple[object, ...]", found)
        except OSError:
            return {}
        return overloads if (version, stamp) == (self._version, self._source_stamp) else {}

    def _save_index(self, overloads: object) -> None:
        self._save(self._index_path, (self._version, self._source_stamp, overloads))

    def _load_data(self, name: str) -> object:
        return _read(Path(self._data_path(name)))

    def _save_data(self, name: str, data: object) -> None:
        self._save(self._data_path(name), data)

    def _save(self, path: str, content: object) -> None:
        data = self._dump(content)
        with self._open_for_write(path) as file:
            file.write(hashlib.blake2b(data).digest() + data)


def _read(path: Path) -> object:
    """Read the saved content.

    Raises:
        OSError: It is missing or damaged; numba compiles the loop in either case.
    """
    content = path.read_bytes()
    digest, data = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    if digest != hashlib.blake2b(data).digest():
        raise OSError(f"{path} is damaged")
    return pickle.loads(data)


_DIGEST_SIZE = hashlib.blake2b().digest_size


class _CheckedCache(cast(Any, caching).FunctionCache):
    def __init__(self, loop: Callable[..., object]) -> None:
        super().__init__(loop)
        plain = self._cache_file
        base = plain._index_name.removesuffix(".nbi") + "-checked"
        self._cache_file = _CheckedFile(plain._cache_path, base, plain._source_stamp)


class _Announcement(event.Listener):
    """Says once per process that kernels are compiled; numba reports none that are on disk."""

    when = "once"
    _is_said = False

    def on_start(self, event: event.Event) -> None:
        if not self._is_said:
            self._is_said = True
            say(f"compiling the kernels for this processor, {self.when}: up to two minutes")

    def on_end(self, event: event.Event) -> None:
        """Do nothing."""


_announcement = _Announcement()
