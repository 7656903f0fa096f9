"""Broken GGUF files: each gets a sentence or is converted, in little time and memory.

    python -m benchmarks.gguf_files
    python -m benchmarks.gguf_files 200

Small files are written; then bytes of a header are changed at random, numbers in it become huge, a
key has a value of another kind, it is cut, or parts of it are repeated. Every such file is
converted in this process, as a run would, with an address space that ends 200 MB and twice the file
above what this process has.
"""

import math
import os
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gguf import GGUFReader, ReaderField

from benchmarks.harness import report, row
from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.common.errors import ModelError
from es_cookbook.plugins.gguf.conversion import converted
from es_cookbook.plugins.gguf.export import write_gguf
from tests.gguf_models import make_gguf_model

FILES = 5000
SECONDS = 5.0
MODELS = ("llama", "llama with biases", "gemma3")
_HUGE = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)


class Good(NamedTuple):
    """A file, where its header ends and its weights begin, and where the values of its keys are."""

    data: bytes
    end: int
    header: int
    values: Sequence[tuple[int, int]]


def _values() -> list[bytes]:
    """Return values with their types, none of which fits every key."""
    array = b"\x09\0\0\0"
    strings = [array + struct.pack("<IQ", 8, n) + bytes(8) * min(n, 1) for n in (1, 2**31, 2**62)]
    numbers = [array + struct.pack("<IQii", kind, 2, -1, 2) for kind in (4, 5, 6, 9, 13)]
    return [
        *(struct.pack("<If", 6, x) for x in (math.nan, math.inf, -1.0, 0.0, 1e-30, 1e30)),
        *(struct.pack("<II", 4, x) for x in (0, 1, 3, 2**16, 2**32 - 1)),
        *(struct.pack("<IQ", 10, x) for x in (2**40, 2**64 - 1)),
        *(struct.pack("<I?", 7, x) for x in (False, True)),
        *(struct.pack("<IQ", 8, len(text)) + text for text in (b"", b"\n\0", b"x" * 5000)),
        *strings,
        *numbers,
        array + struct.pack("<IQ", 5, 0),
        struct.pack("<Ii", 5, -1),
    ]


VALUES = _values()


def good_file(name: str, home: Path) -> Good:
    """Write a small file of one of the models that tests make."""
    model, file = make_gguf_model(name, home / name), home / f"{name}.gguf"
    write_gguf(model, file, "float16", str(model))
    converted(file)
    reader = GGUFReader(file)
    fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]
    starts = [field.offset + 8 + len(field.name.encode()) for field in fields]
    values = list(zip(starts, map(_end, fields), strict=True))
    end = max(_end(tensor.field) for tensor in reader.tensors)
    return Good(file.read_bytes(), end, reader.data_offset, values)


def _end(field: ReaderField) -> int:
    return field.offset + sum(part.nbytes for part in field.parts)


def broken(good: Good, random: random.Random) -> bytes:
    """Return a copy of a file with one kind of damage, mostly in its header."""
    data, header = good.data, good.header
    changed = bytearray(data)
    match random.randrange(8):
        case 0:
            for _ in range(random.choice((1, 3, 20))):
                changed[random.randrange(header)] = random.randrange(256)
        case 1:
            size = random.choice("IQ")
            number = random.choice(_HUGE) % 2 ** (8 * struct.calcsize(size))
            at = random.randrange(4, header)
            changed[at : at + struct.calcsize(size)] = struct.pack(f"<{size}", number)
        case 2:
            del changed[random.randrange(len(changed)) :]
        case 3:
            at = random.randrange(header)
            del changed[at : at + random.randrange(1, 40)]
        case 4:
            at, size = random.randrange(header), random.randrange(1, 200)
            changed[at:at] = changed[at : at + size] * random.choice((1, 50))
        case 5 | 6:
            chosen = random.sample(good.values, random.choice((1, 1, 3)))
            del changed[good.end :]
            for start, end in sorted(chosen, reverse=True):
                changed[start:end] = random.choice(VALUES)
            changed += bytes(-len(changed) % 32) + data[header:]
        case _:  # A number right behind a key: sizes, counts and ids.
            keys = [b"block_count", b"_length", b"head_count", b"_token_id", b"freq_base", b"size"]
            key = random.choice(keys)
            at = changed.index(key) + len(key) + 4
            number = random.choice(_HUGE) % 2**32
            changed[at : at + 4] = struct.pack("<I", number)
    return bytes(changed)


def main(count: int) -> None:
    ended: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        os.environ[CACHE] = str(home / "cache")
        goods, bad = [good_file(name, home) for name in MODELS], home / "bad.gguf"
        most = _memory() + 200 * 2**20 + 2 * max(len(good.data) for good in goods)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        slowest = 0.0
        for seed in range(count):
            bad.write_bytes(broken(goods[seed % len(goods)], random.Random(seed)))
            began = time.process_time()
            try:
                converted(bad)
                ended["converted"] += 1
            except ModelError as error:
                ended["a sentence" if "\n" not in str(error) else "several lines"] += 1
            except BaseException as error:
                ended["something else"] += 1
                print(seed, repr(error)[:300])
            slowest = max(slowest, time.process_time() - began)
    wrong = ended["something else"] + ended["several lines"]
    rows = [row(f"files: {what}", [number], "") for what, number in ended.items()]
    rows.append(row("neither a sentence nor converted", [wrong], "", at_most=0))
    rows.append(row("slowest, processor seconds", [slowest], "s", at_most=SECONDS))
    report("gguf_files", rows)


def _memory() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else FILES)
