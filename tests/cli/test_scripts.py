"""Runs of a user's script are played, exported, forked, rewound and resumed like any other."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from es_cookbook.common.configs import load_config
from es_cookbook.common.errors import ConfigError
from es_cookbook.runs.config import Config, recorded_config
from es_cookbook.runs.history.store import read_history
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.programs import Programs
from tests.said import refused, typed

ROOT = Path(__file__).parents[2]


def do(name: str, *options: str) -> str:
    done = typed(name, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """A run of `recipes/custom_env.py`, started as its page says."""
    path = tmp_path_factory.mktemp("script") / "run"
    options = [f"log_path={path}", "num_generations=2", "optimizer.population_size=4"]
    done = programs.run("recipes/custom_env.py", *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.slow
def test_it_has_measured_what_its_env_reports(run: Path) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["progress/rollouts"] for row in rows] == [36, 72, 72]
    assert all(0 <= row["test/env/all/found"] <= 1 for row in (rows[0], rows[-1]))
    assert rows[0]["progress/tokens"] > 36 * 4, "more than one turn of at most four tokens"


@pytest.mark.slow
def test_every_command_works_on_it_and_says_what_to_trust(run: Path, tmp_path: Path) -> None:
    log_path = shutil.copytree(run, tmp_path / "run")
    here = ROOT / "recipes/custom_env.py"
    assert '"custom_env:GuessDatasetBuilder"' in (log_path / "config.json").read_text()
    for name, options in (("play", ["problem=3"]), ("resume", []), ("fork", ["output=no"])):
        said = refused(name, f"log_path={log_path}", *options)
        assert said.endswith("or trust=path/to/custom_env.py if that is a script\n")
    trusted = (f"log_path={log_path}", f"trust={here}")
    assert "test problem 3" in do("play", *trusted, "problem=3", "genome=base")
    do("export", f"log_path={log_path}", f"output={tmp_path / 'exported'}")
    assert (tmp_path / "exported/model.safetensors").is_file()
    said = do("rewind", f"log_path={log_path}", "generation=1")
    assert f"resume log_path={log_path}\n" in said
    forked, rewound = tmp_path / "fork", log_path / "rewound/1"
    said = do("fork", str(rewound), f"output={forked}", f"trust={here}", "num_generations=3")
    assert f"resume log_path={forked} trust={here}\n" in said
    for path, generations in ((log_path, 2), (forked, 3)):
        do("resume", f"log_path={path}", f"trust={here}")
        assert len(list(read_history(path / "history.jsonl"))) == generations
    histories = [(path / "history.jsonl").read_bytes() for path in (log_path, run)]
    assert histories[0] == histories[1]


SCRIPT = """
import chz
from es_cookbook.rl.types import RLDatasetBuilder
from tests.fakes import SmallDatasetBuilder
import lies_beside

@chz.chz
class Problems(SmallDatasetBuilder):
    number: int = chz.field(default=lies_beside.NUMBER, doc="of them")
"""


RUNS = """
from es_cookbook.common.cli import run_cli
from es_cookbook import Config
run_cli(print, Config)
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run whose Config names a class of a script that this process has not run."""
    shutil.copytree(ROOT / "tests/data/recorded/low_rank", tmp_path / "run")
    config = tmp_path / "run/config.json"
    plain = json.loads(config.read_text())
    plain["dataset"] = {"$class": "a_script_of_mine:Problems", "number": 4}
    config.write_text(json.dumps(plain))
    (tmp_path / "a_script_of_mine.py").write_text(SCRIPT)
    (tmp_path / "lies_beside.py").write_text("NUMBER = 3")
    return tmp_path


def test_a_trusted_script_may_import_its_neighbours(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    trust = ["tests", str(written / "a_script_of_mine.py")]
    with pytest.raises(ConfigError, match=r"trust=path/to/a_script_of_mine\.py if"):
        recorded_config(written / "run", ["tests"])
    with pytest.raises(ConfigError, match=r"trust it by its path: trust=.*/a_script_of_mine\.py"):
        recorded_config(written / "run", ["tests", "a_script_of_mine"])
    config = recorded_config(written / "run", trust)
    assert type(config.dataset).__module__ == "a_script_of_mine"
    assert recorded_config(written / "run", trust).dataset == config.dataset
    # And another of the same name is not taken for it.
    (written / "other").mkdir()
    other = shutil.copy(written / "a_script_of_mine.py", written / "other")
    with pytest.raises(ConfigError, match="another module is called a_script_of_mine"):
        recorded_config(written / "run", ["tests", str(other)])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("fails_at_once.py", "1 / 0", "cannot be imported: division by zero"),
        ("trains.py", "from es_cookbook import run; run(None)", "put that behind `if __name"),
        ("has_a_cli.py", RUNS, "it starts to work when it is imported"),
        ("has_no_such_class.py", "", "has nothing called Problems"),
    ],
)
def test_an_unusable_script_is_refused_in_one_sentence(
    written: Path, name: str, text: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = written / name
    if text is not None:
        script.write_text(text)
    config = written / "run/config.json"
    config.write_text(config.read_text().replace("a_script_of_mine", script.stem))
    with pytest.raises(ConfigError) as caught:
        load_config(config, Config, ["tests", str(script)])
    assert said in str(caught.value) and "\n" not in str(caught.value)
