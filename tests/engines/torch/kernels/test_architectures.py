"""Kernels are made of operations that any processor has, in LLVM's words, not one maker's."""

import re
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import pytest
from llvmlite import binding

from es_cookbook.engines.torch.kernels.lanes import (
    LANES,
    Row,
    add,
    among,
    exponential,
    largest_of,
    load,
    prefetch,
    read,
    spread,
    store,
    sum_of,
    write,
)

_COUNTING = r"(?:tail )?call i8 @llvm.x86.atomic.sub.cc.*|declare i8 @llvm.x86.atomic.sub.cc.*"
"""What this processor makes of numba's own counting of references, in whatever is compiled."""
_ARM, _OLDEST = "aarch64-unknown-linux-gnu", "cortex-a72"
"""Of the 64-bit ones in use, from before bfloat16 and half-precision arithmetic."""


_array = cast("Callable[[object, int], Row]", numba.carray)


def _every_operation(floats: object, brains: object, halves: object) -> None:
    x, b, h = _array(floats, 64), _array(brains, 64), _array(halves, 64)
    prefetch(x, 16)
    row = exponential(add(load(x, 0), add(load(b, 1), load(h, 2))))
    store(x, 16, among(row, 3, 9, read(h, 5)))
    store(b, 16, row)
    write(b, 40, read(b, 41))
    store(x, 32, spread(sum_of(row) + largest_of(row)))


def _of_every_operation() -> str:
    """A kernel of all operations in LLVM's words, as they are for this processor."""
    signature = "void(CPointer(float32), CPointer(uint16), CPointer(int16))"
    made = cast(Any, numba.cfunc(signature, error_model="numpy"))(_every_operation)
    return re.sub(
        _COUNTING, lambda found: "add i8 0, 0" if "call" in found[0] else "", made.inspect_llvm()
    )


def _for_arm(text: str) -> str:
    """Assembly that LLVM makes of it for another processor than this one."""
    llvm = cast(Any, binding)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(_ARM).create_target_machine(cpu=_OLDEST, opt=2)
    neutral = re.sub(r'target (triple|datalayout) = .*\n|"target-[\w-]+"="[^"]*"', "", text)
    module = llvm.parse_assembly(neutral)
    module.triple, module.data_layout = _ARM, str(target.target_data)
    module.verify()
    return target.emit_assembly(module)


def test_every_operation_of_kernels_is_vector_instructions_on_arm() -> None:
    text = _of_every_operation()
    assert "llvm.x86" not in text
    try:
        assembly = _for_arm(text)
    except RuntimeError as error:
        if "No available targets" in str(error):
            pytest.skip("this llvmlite has no code generator for it")
        raise
    instructions = set(re.findall(r"\t([a-z]+)2?\t", assembly))
    assert {"fmla", "prfm", "frintm", "shll"} <= instructions
    called = re.findall(r"\tbl\t(?!_ZN|NRT_|numba_|Py)(\S+)", assembly)
    assert not called, "nothing is left to a library's function for one number"


@numba.njit(error_model="numpy")
def _widen(halves: Row, many: Row, one: Row) -> None:
    for i in range(0, len(halves), LANES):
        store(many, i, load(halves, i))
    for i in range(len(halves)):
        one[i] = read(halves, i)


def test_every_float16_is_widened_exactly() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    many, one = np.empty((2, 65536), np.float32)
    _widen(halves.view(np.int16), many, one)
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(many, expected, equal_nan=True)
    assert np.array_equal(one, expected, equal_nan=True)
    assert np.array_equal(np.signbit(many), np.signbit(expected))
