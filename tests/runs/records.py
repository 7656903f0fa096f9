"""A history's records, made up: a pure function of the generation."""

import random
from pathlib import Path

from es_cookbook.evolution.genome import MAX_SEED, Step, Term
from es_cookbook.runs.directory.directory import GENERATION_KEYS, cut_lines
from es_cookbook.runs.history.format import Header, Record

HEADER = Header("models/tiny", weights="abcd", tokenizer="ef01", dtype="float32")


def make_record(generation: int, num_genomes: int = 4) -> Record:
    chooser = random.Random(generation)
    return Record(
        generation=generation,
        step=Step(
            tuple(
                Term(chooser.randrange(MAX_SEED), -chooser.random() * 1e-5)
                for _ in range(num_genomes)
            ),
            decay=0.01,
        ),
        fitness_G=tuple(chooser.gauss(0, 1) for _ in range(num_genomes)),
        fingerprint=chooser.getrandbits(64),
    )


def cut_run(run: Path, generations: int) -> None:
    """Cut a run to its first generations, as it stood after them."""
    history = run / "history.jsonl"
    history.write_bytes(b"".join(history.read_bytes().splitlines(keepends=True)[: generations + 1]))
    for name in GENERATION_KEYS:
        cut_lines(run / name, generations)
