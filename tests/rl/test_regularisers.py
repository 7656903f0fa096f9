"""Regularisers are options by the names of what is registered, the plug-ins' and others'."""

import os
import subprocess
import sys
from pathlib import Path

from tests.distributions import Register

ROOT = Path(__file__).parents[2]
OTHER = """\
import chz
from es_cookbook.rl.regularisers import Regulariser

@chz.chz
class Mine(Regulariser):
    size: int = chz.field(default=1, doc="s")

    def __call__(self, tokenizer, context_length, run_seed):
        return lambda generation, batch_P: batch_P[: self.size]
"""
CHOSEN = """\
import sys
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_from_json, config_to_json
from es_cookbook.recipes.countdown.train_cli import CLIConfig

def show(config):
    text = config_to_json(config)
    print([type(each).__name__ for each in config.regularisers], config.mine.size, '"kl"' in text)
    print(config_from_json(text) == config)

run_cli(show, CLIConfig, sys.argv[1:])
"""


def test_what_another_distribution_has_registered_is_an_option_too(
    register: Register, tmp_path: Path
) -> None:
    folder = register({"regularisers": {"mine": "others:Mine"}})
    (folder / "others.py").write_text(OTHER)
    (tmp_path / "chosen.py").write_text(CHOSEN)
    python_path = os.pathsep.join([str(folder), str(ROOT), *sys.path])
    found = subprocess.run(
        [sys.executable, "chosen.py", "mine.weight=1", "mine.size=3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.splitlines() == ["['Mine'] 3 False", "True"], found.stderr
