"""The most memory that a run has resident: evolution strategies beside gradients, an equal batch.

    python -m benchmarks.gradient_memory                  # es, group, grpo
    python -m benchmarks.gradient_memory es surrogate     # some

A model of 22 million random weights, 86 MB in float32, and Countdown's problems: a batch is 32 of
them, 16 answers of at most 32 tokens to each. With `es` they are those of 16 genomes, with
`surrogate` the centre's, which 16 genomes score; a gradient takes one step on them. All sample on
an engine with the same 256 MiB for keys and values, which by itself would take a share of what is
free. Each run has a process of its own, and what importing torch and transformers takes is left
out. It is on the CPU: weights, moments, gradients, caches and activations are in one memory.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import chz

from benchmarks.harness import Row, report, row
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.plugins.gradients.commands.compare_gradients import NAMES, first_config
from es_cookbook.plugins.gradients.commands.measured_runs import AnyConfig, run_measured
from es_cookbook.rl.surrogate import Surrogate
from es_cookbook.runs.config import Config
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tools.bundled.countdown import CHARACTERS
from tools.small_model import build_model, build_tokenizer, save

GENOMES = 16
WIDTH, DEPTH = 512, 6


def config_of(name: str, model: Path, log_path: Path) -> AnyConfig:
    """One generation of one contestant."""
    config = first_config("countdown", name)
    config = chz.replace(
        config,
        model_name=str(model),
        num_generations=1,
        engine=TorchEngineBuilder(kv_cache_gib=0.25, prefix_cache_gib=0.0),
        eval_every=0,
        trackers=JsonlTrackerBuilder(),
        log_path=str(log_path),
        dataset=chz.replace(config.dataset, num_test=2),
        sampling=chz.replace(config.sampling, max_tokens=32),
    )
    if not isinstance(config, Config):
        return chz.replace(config, attempts=GENOMES)
    optimizer = chz.replace(config.optimizer, population_size=GENOMES)
    surrogate = config.surrogate and Surrogate(attempts=GENOMES)
    return chz.replace(config, optimizer=optimizer, surrogate=surrogate)


def main(chosen: Sequence[str]) -> None:
    """Measure one contestant after the other, and report."""
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        tokenizer = build_tokenizer(CHARACTERS)
        save(build_model(tokenizer, 0, WIDTH, DEPTH), tokenizer, model)
        for name in chosen or ("es", "group", "grpo"):
            if name in NAMES:
                config = config_of(name, model, Path(directory) / name)
                peaks[name] = run_measured(config).peak_bytes
    rows: list[Row] = [row(name, [peak / 2**20], "MiB") for name, peak in peaks.items()]
    for ours in ("es", "surrogate"):
        for theirs in ("group", "grpo"):
            if {ours, theirs} <= peaks.keys():
                ratio = peaks[ours] / peaks[theirs]
                goal = 0.6 if ours == "es" else None
                rows.append(row(f"{ours} / {theirs}", [ratio], "x", at_most=goal))
    report("gradient_memory", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
