"""The recipe that shows how problems are chosen: its parts, its command line, a short run."""

from pathlib import Path

import pytest

from benchmarks.mixture import VARIANTS
from es_cookbook.recipes.mixture.dataset import CountdownMixture
from es_cookbook.recipes.mixture.train_cli import CLIConfig
from tests.recipe_problems import parsed, short_run


def test_easy_problems_fade_out() -> None:
    easy, main_, hard = CountdownMixture().members
    assert [easy.schedule(t, 40) for t in (0, 5, 20, 39)] == [0.5, 0.375, 0.0, 0.0]
    assert [main_.schedule(t, 40) for t in (0, 5, 20, 39)] == [0.5, 0.625, 1.0, 1.0]
    assert hard.schedule(39, 40) == 1.0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_ablation_is_a_config(variant: str) -> None:
    config = parsed(CLIConfig, *VARIANTS[variant].split())
    assert (config.num_pairs == 0) == (variant != "batch_per_pair")


def test_a_run_of_two_generations(tmp_path: Path) -> None:
    sizes = [
        f"{part}.num_{of}" for part in ("easy", "main", "hard") for of in ("train=40", "test=2")
    ]
    batches = "dataset.problems_per_generation=4", "dataset.replay.warmup=1"
    options = *batches, "sampling.max_tokens=8", *(f"dataset.{size}" for size in sizes)
    first, second, last = short_run("mixture", tmp_path / "run", *options)
    assert {"data/share/easy", "data/share/main", "data/share/hard"} <= first.keys()
    assert second["data/left_out"] + second["data/replayed"] > 0
    assert {"test/env/easy/correct", "test/env/main/correct"} <= last.keys()
