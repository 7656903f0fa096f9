"""Broken GGUF files: each gets a sentence or is converted, in little time and memory.

    python -m benchmarks.gguf_files
    python -m benchmarks.gguf_files 200

A small file is written; then bytes of its header are changed at random, numbers in it become huge,
it is cut, or parts of it are repeated. Every such file is converted in this process, as a run
would, with an address space that ends 200 MB and twice the file above what this process has.
"""

import os
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.harness import report, row
from es_cookbook.checkpoints import gguf
from es_cookbook.checkpoints.gguf_export import write_gguf
from es_cookbook.common.errors import ModelError
from tests.gguf_models import make_gguf_model

FILES = 5000
SECONDS = 5.0
_HUGE = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)


def broken(data: bytes, header: int, random: random.Random) -> bytes:
    """A copy of a file with one kind of damage, mostly in its header."""
    changed = bytearray(data)
    match random.randrange(6):
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
        os.environ[gguf.CACHE] = str(home / "cache")
        model = make_gguf_model("llama", home / "model")
        good, bad = home / "good.gguf", home / "bad.gguf"
        write_gguf(model, good, "float16", str(model))
        gguf.converted(good)
        data = good.read_bytes()
        first = min(tensor.start for tensor in gguf.read_header(good).tensors.values())
        most = _memory() + 200 * 2**20 + 2 * len(data)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        slowest = 0.0
        for seed in range(count):
            bad.write_bytes(broken(data, first, random.Random(seed)))
            began = time.process_time()
            try:
                gguf.converted(bad)
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
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else FILES)
