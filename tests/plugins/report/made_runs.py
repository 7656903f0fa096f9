"""Run directories as programs leave them, with contents that a test makes up."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from es_cookbook.evolution.genome import Step, Term
from es_cookbook.runs.history.format import Header, Record, encode

ES = {
    "$format": 1,
    "$class": "es_cookbook.recipes.countdown.train_cli:CLIConfig",
    "model_name": "models/tiny",
    "optimizer": {
        "$class": "es_cookbook.evolution.optimizers.es:ES",
        "sigma": 0.01,
        "antithetic": True,
    },
    "num_generations": 4,
    "seed": 0,
}
GRADIENTS = {
    "$format": 1,
    "$class": "es_cookbook.plugins.gradients.policy_gradient:Config",
    "model_name": "models/tiny",
    "dataset": {"$class": "es_cookbook.recipes.countdown.dataset:CountdownDatasetBuilder"},
    "num_generations": 4,
    "seed": 0,
}
REWARDS_G = (0.25, 0.5, 0.75, 0.9)


def make_run(
    path: Path,
    generations: int = 4,
    config: Mapping[str, object] = ES,
    rollouts: Sequence[Mapping[str, object]] | None = None,
    **fields: object,
) -> Path:
    """A run of so many generations, complete where its Config asks for no more."""
    path.mkdir(parents=True)
    write(path / "config.json", [{**config, "log_path": str(path), **fields}])
    write(path / "metrics.jsonl", [metrics(t) for t in range(generations)] + [last(generations)])
    if config is GRADIENTS:
        (path / "checkpoints").mkdir()
    else:
        lines = [
            encode(Header("models/tiny", "ab", "cd", "float32")),
            *map(record, range(generations)),
        ]
        (path / "history.jsonl").write_bytes(b"".join(lines))
    if rollouts is None:
        rollouts = [rollout(t, g) for t in range(generations) for g in range(4)]
    write(path / "rollouts.jsonl", rollouts)
    return path


def grow(path: Path, generation: int) -> None:
    """Add a generation to a run in progress."""
    for name, line in ("rollouts", rollout(generation, 0)), ("metrics", metrics(generation)):
        with (path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    with (path / "history.jsonl").open("ab") as file:
        file.write(record(generation))


def write(path: Path, lines: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def metrics(generation: int) -> dict[str, object]:
    mean = sum(REWARDS_G) / 4
    spread = (sum((reward - mean) ** 2 for reward in REWARDS_G) / 4) ** 0.5
    held_out = {"test/env/all/correct": 0.25 + 0.1 * generation} if generation % 2 == 0 else {}
    return {
        "progress/generation": generation,
        **held_out,
        "progress/rollouts": 128 * (generation + 1),
        "progress/tokens": 128 * 20 * (generation + 1),
        "reward/mean": mean,
        "reward/max_genome": max(REWARDS_G),
        "reward/min_genome": min(REWARDS_G),
        "reward/std_genomes": spread,
        "env/all/correct": 0.3 + 0.1 * generation,
        "env/all/format": 0.9,
        "genomes/tied_fraction": 0.0,
        "step/rms_over_sigma": 0.2,
        "centre/drift_rms": 0.002 * (generation + 1),
        "time/sample": 3.0,
        "time/score": 0.5,
        "time/total": 4.0,
        "throughput/answers_per_second": 80.0,
        "throughput/tokens_per_second": 640.0,
    }


def last(generation: int) -> dict[str, object]:
    return {
        "progress/generation": generation,
        "test/env/all/correct": 0.75,
        "progress/rollouts": 128 * generation,
        "progress/tokens": 128 * 20 * generation,
    }


def record(generation: int) -> bytes:
    """A line of the history: fitness as z-scores of `REWARDS_G`."""
    mean = sum(REWARDS_G) / 4
    spread = (sum((reward - mean) ** 2 for reward in REWARDS_G) / 4) ** 0.5
    fitness_G = tuple((reward - mean) / spread for reward in REWARDS_G)
    step = Step((Term(random.Random(generation).getrandbits(63), 0.001),))
    return encode(Record(generation, step, fitness_G, generation))


def rollout(
    generation: int,
    genome: int = 0,
    action: str = "",
    prompt: str = "1,2,3=6\n",
    reward: float | None = None,
    **fields: object,
) -> dict[str, object]:
    """A line of `rollouts.jsonl`: one turn, unless `turns` says otherwise."""
    reward = REWARDS_G[genome % 4] if reward is None else reward
    turn = {
        "prompt": prompt,
        "action": action or f"<think>try {generation}</think><answer>{genome}+2+3</answer>",
        "stop_reason": "stop",
        "reward": reward,
        "metrics": {"correct": float(reward > 0.5)},
        "logs": {},
    }
    which = {"generation": generation, "problem": 0, "genome": genome, "attempt": 0}
    return {
        **which,
        "tags": ["easy" if genome < 2 else "hard"],
        "reward": reward,
        "turns": [turn],
        **fields,
    }
