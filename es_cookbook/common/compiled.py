"""Loops that numba compiles for the CPU: machine code without the interpreter's lock."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(signature: object, version: str = "") -> Callable[[_Loop], _Loop]:
    """Compile a function when its module is imported, and keep it on disk for the next process.

    There are no fast-math flags, and without them LLVM neither fuses a product with a sum nor
    reorders sums: the bits are those that the source says, on every processor.

    Args:
        signature: types of the arguments, in numba's words or as its types.
        version: of what the loop is made of outside of its module, whose changes numba would not
            see: it keeps machine code by the module's own time and the function's name.
    """
    how = {"nogil": True, "error_model": "numpy"}

    def made(loop: _Loop) -> _Loop:
        if version:
            loop.__qualname__ += f"_{version}"
        try:
            return cast("_Loop", numba.njit(signature, cache=True, **how)(loop))
        except RuntimeError:  # neither this package's folder nor the user's can be written
            return cast("_Loop", numba.njit(signature, **how)(loop))

    return made
