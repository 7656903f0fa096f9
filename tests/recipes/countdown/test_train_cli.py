"""The main job's command line: its defaults, its options, and what it says about mistakes."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL, CLIConfig
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.recipe_problems import parsed
from tests.said import SMALL_COUNTDOWN, whole_lines

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("option", "code", "sentence"),
    [
        ("optimizer.sigmo=1", 2, "did you mean 'optimizer.sigma'?"),
        ("engine=torhc", 2, "did you mean 'torch'?"),
        ("sampling=greedy", 2, "it has no choices; set its fields, as in sampling."),
        (
            "optimizer.population_size=7",
            1,
            "optimizer.population_size must be even with antithetic=True, because "
            "genomes come in mirrored pairs; found 7\n",
        ),
        ("optimizer=cma", 1, "add search_space=singular_values search_space.start=... (the"),
        ("optimizer=qes", 1, "add search_space=quant_codes, with a GPTQ or compressed-tensors"),
        ("objective=pass_at_k", 1, "objective.k=4 needs attempts=4 or more at each problem"),
        ("targets=q_proj", 2, "unknown option 'targets'; did you mean"),
        ("dataset.num_train=x", 2, "dataset.num_train=x: it must be int"),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: pytest.CaptureFixture[str], option: str, code: int, sentence: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(CLIConfig, option)
    said = capsys.readouterr().err
    assert caught.value.code == code
    assert sentence in said
    assert said.count("\n") == 1


TINY = (*SMALL_COUNTDOWN, "trackers=JsonlTrackerBuilder")


@pytest.mark.slow
def test_the_command_trains_and_says_what_it_does_and_what_it_brought(tmp_path: Path) -> None:
    """And transformers, which has a warning about this model, says it to the log."""
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(BUNDLED_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["unknown"] = 1
    (model / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "es_cookbook.recipes.countdown.train_cli"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *TINY, f"log_path={run}", f"model_name={model}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("test/env/all/correct ")
    told = re.search(r" in ([\d.]+) (s|min) \(2 generations: .*\); everything", done.stdout)
    assert told is not None
    seconds = float(told[1]) * {"s": 1, "min": 60}[told[2]]
    assert took / 2 < seconds < took + 5, "start, loading and evaluations are in it"
    assert done.stdout.endswith(f"everything is in {run}\n")
    assert whole_lines(done.stderr) == [
        f"{run}: loading {model} on torch",
        "checking 8 training problems",
        "evaluating 4 held-out problems before the first generation",
    ]
    assert "Unrecognized keys in `rope_parameters`" in (run / "log.txt").read_text()
    rows = read_metrics(run / "metrics.jsonl")
    assert {"test/env/all/correct", "test/env/all/format"} <= rows[0].keys() & rows[-1].keys()
