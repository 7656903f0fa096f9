"""A history's records, made up: a pure function of the generation."""

import random

from es_cookbook.evolution.genome import MAX_SEED, Step, Term
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
