"""docs/history_format.md in NumPy: python rebuild.py RUN MODEL_DIRECTORY OUTPUT.npz GENERATION."""

import json
import sys
import zlib
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

F, U, quantile = np.float32, np.uint64, NormalDist().inv_cdf
T = np.array([quantile((k + 0.5) / 65536) * 1.0000101408279616 for k in range(65536)], F)
run, model, output, generation = sys.argv[1:]
lines = Path(run, "history.jsonl").read_bytes().splitlines()
assert all(line[-10:] == b'%08x"}' % zlib.crc32(line[:-23]) for line in lines), "damaged"
header, *records = map(json.loads, lines)
space = json.loads(Path(run, "config.json").read_bytes())["search_space"]


def key(text: str, size: int, person: bytes = b"") -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=size, person=person).digest()[::-1])


def words(seed: int, name: str, size: int) -> Any:
    generator = np.random.Philox(key=seed | key(name, 8) << 64)
    return generator.random_raw(size // 4 + 4).astype("<u8")


def noise(seed: int, name: str, size: int) -> Any:
    if space["noise"] == "gaussian":
        return T[words(seed, name, size).view("<u2")[:size]]
    bits = np.unpackbits(words(seed, name, size).view("u1"), bitorder="little")
    return bits[:size] * F(2) - 1


def inside(seed: int, name: str, w: Any, parts: int) -> Any:
    lanes = words(seed >> 16, name + ".partition", w.size // 4096).view("<u2").astype("u4")
    own = lanes * parts >> 16 == seed % 65536 % parts
    return np.repeat(own, 4096)[: w.size].reshape(w.shape)


def add(w: Any, name: str, terms: Any) -> Any:
    for seed, coefficient in terms:
        s = F(coefficient / np.sqrt(space.get("rank", 1)))
        if s and "rank" in space:
            a = noise(seed, name + ".A", len(w) * space["rank"]).reshape(len(w), -1)
            b = noise(seed, name + ".B", w.shape[1] * space["rank"]).reshape(w.shape[1], -1)
            for k in range(space["rank"]):
                w += (s * a[:, k])[:, None] * b[:, k]
        elif s:
            parts = space.get("partitions", 1)
            own = inside(seed, name, w, parts)
            w[own] += F(coefficient * parts**0.5) * noise(seed, name, w.size).reshape(w.shape)[own]
    return w


def adam(w: Any, name: str, terms: Any, rule: Any) -> None:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for count, first, second in zip(rule["counts"], rule["first"], rule["second"], strict=True):
        g = add(np.zeros_like(w), name, [next(terms) for _ in range(count)])
        m, v = m + F(first) * g, v + F(second) * (g * g)
    w += F(rule["rate"]) * (m / (np.sqrt(v) + F(rule["epsilon"])))


base = {}
for file in Path(model).glob("*.safetensors"):
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        shape = entry.get("shape", ())
        if (len(shape) == 2 and "embed" not in name) if "rank" in space else shape:
            first, end = entry["data_offsets"]
            stored = np.frombuffer(data[start + first : start + end], "<u2")
            bits = stored.astype("<u4") << 16 if entry["dtype"] == "BF16" else stored.view("<u4")
            if header["dtype"] == "bfloat16":
                bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
            base[name] = bits.view("<f4").reshape(shape)
centre = {name: weight.copy() for name, weight in base.items()}
for record in records[: int(generation)]:
    fingerprint, decay, rule = 0, record["decay"], record.get("rule")
    seeds = [int(seed, 16) for seed in record["seeds"].split()]
    for name, w in centre.items():
        terms = zip(seeds, record["coefficients"], strict=True)
        if decay:
            w[:] = base[name] if decay == 1 else base[name] + F(1 - decay) * (w - base[name])
        adam(w, name, terms, rule) if rule else add(w, name, terms)
        m = key(name, 16, b"fingerprint")
        factors = U(m % 2**64 | 1) + U(m >> 64 & ~3 | 2) * np.arange(w.size, dtype=U)
        fingerprint += int((w.view("<u4").ravel() * factors).sum())
    assert fingerprint % 2**64 == int(record["fingerprint"], 16), record["generation"]
np.savez(output, **centre)
