"""A run that this user began needs no more trust; any other, and any that was changed, does."""

import importlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_to_json, load_config
from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.branches.branches import rewind_run
from es_cookbook.plugins.branches.fork import Fork
from es_cookbook.plugins.branches.fork import main as fork
from es_cookbook.plugins.branches.rewind import Rewind
from es_cookbook.plugins.branches.rewind import main as rewind
from es_cookbook.plugins.hub.background_push import HubPush
from es_cookbook.plugins.judges.reward import Judge
from es_cookbook.plugins.mcp.dataset import ToolRows
from es_cookbook.plugins.play.play import PlayConfig
from es_cookbook.plugins.play.play import main as play
from es_cookbook.plugins.program.dataset import ProgramRows
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.rewards.matching import Exact
from es_cookbook.runs.config import Config, recorded_config
from es_cookbook.runs.directory.opening import RunState, open_run_directory
from es_cookbook.runs.directory.trusted import keep_scripts, with_sealed
from es_cookbook.runs.history.store import read_prefix
from es_cookbook.runs.tracking.trackers import TrackersBuilder
from tests.chat_server import chat_server
from tests.every_reference import PACKAGE

RECORDED = Path(__file__).parents[2] / "data/recorded/low_rank"
HUB = "hub:me/run"
PUSHED = TrackersBuilder(hub=HubPush(repo_id="me/run"))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the secret is."""
    monkeypatch.setenv("ES_COOKBOOK_STATE", str(tmp_path / "state/es_cookbook"))
    return tmp_path / "state/es_cookbook"


@pytest.fixture
def config() -> Config:
    """Of a run that asks a judge and pushes."""
    base = load_config(RECORDED / "config.json", Config)
    judge = Judge(url="https://judge.example/v1", model="m")
    dataset = Task(source="rows.jsonl", reward=judge)
    model_name = str(PACKAGE / "recipes/countdown/model")
    return chz.replace(base, dataset=dataset, model_name=model_name, trackers=PUSHED)


def begun(log_path: Path, config: Config, recorded: str | None = None) -> Path:
    """A run that this user begins, or goes on with, which has another's four generations."""
    log_path.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDED / "history.jsonl", log_path)
    history = read_prefix(log_path / "history.jsonl", None)
    assert history.header is not None
    state = RunState("resume", recorded, history) if recorded else RunState("begin")
    length = config.num_generations
    directory = open_run_directory(log_path, config_to_json(config), length, history.header, state)
    directory.begin()
    directory.history.close()
    for name in ("history.jsonl", "metrics.jsonl", "rollouts.jsonl"):
        shutil.copy(RECORDED / name, log_path)
    return log_path


def stranger(log_path: Path, config: Config) -> Path:
    """The same as a stranger made it."""
    shutil.rmtree(begun(log_path, config).parent / "state")
    return log_path


def test_a_run_that_was_begun_here_is_not_asked_again_also_when_it_is_moved(
    tmp_path: Path, config: Config, state: Path
) -> None:
    run = begun(tmp_path / "run", config)
    assert recorded_config(run) == config
    assert recorded_config(run.rename(tmp_path / "moved")) == config
    assert stat.S_IMODE((state / "secret").stat().st_mode) == 0o600
    assert [path.name for path in state.iterdir()] == ["secret"]


@pytest.mark.parametrize("change", ["config", "seal", "secret", "no seal", "deep"])
def test_a_changed_config_another_machine_and_no_seal_are_asked(
    tmp_path: Path, config: Config, state: Path, change: str
) -> None:
    run = begun(tmp_path / "run", config)
    seal, text = run / "seal", (run / "config.json").read_text()
    if change == "config":
        (run / "config.json").write_text(text.replace("judge.example", "evil.example"))
    elif change == "seal":
        sealed = json.loads(seal.read_text())
        seal.write_text(json.dumps(sealed | {"scripts": {"evil": ["/tmp/evil.py", "0"]}}))
    elif change == "secret":
        (state / "secret").write_bytes(bytes(32))
    elif change == "deep":
        seal.write_text("[" * 100_000)
    else:
        seal.unlink()
    with pytest.raises(ConfigError, match=r"config\.dataset\.reward\.url: .* add trust=https"):
        recorded_config(run)
    host = "https://evil.example" if change == "config" else "https://judge.example"
    with pytest.raises(ConfigError, match=rf"add trust={HUB}$"):
        recorded_config(run, [host])
    assert recorded_config(run, [host, HUB]).trackers == PUSHED
    assert recorded_config(run, [host], typed=["trackers.hub"]).trackers == PUSHED


def test_runs_work_where_nothing_can_be_remembered(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ES_COOKBOOK_STATE", str(tmp_path / "file/state"))
    run = begun(tmp_path / "run", config)
    assert not (run / "seal").exists()
    with pytest.raises(ConfigError, match="add trust="):
        recorded_config(run)


def test_a_run_that_goes_on_is_sealed_only_as_far_as_it_is_the_users_word(
    tmp_path: Path, config: Config
) -> None:
    run = stranger(tmp_path / "run", config)
    text = (run / "config.json").read_text()
    unpushed = chz.replace(config, trackers=TrackersBuilder())  # trackers.hub=None was typed.
    begun(run, chz.replace(unpushed, num_generations=9), text)
    with pytest.raises(ConfigError, match="add trust=https"):
        recorded_config(run)
    text = (run / "config.json").read_text()
    begun(run, chz.replace(config, num_generations=10), text)  # All of it was named.
    assert recorded_config(run) == chz.replace(config, num_generations=10)
    text = (run / "config.json").read_text()
    begun(run, chz.replace(unpushed, num_generations=11), text)
    assert recorded_config(run) == chz.replace(config, num_generations=11)


def test_forks_and_rewinds_stay_the_users_own(tmp_path: Path, config: Config) -> None:
    run = begun(tmp_path / "run", config)
    rewind_run(run, 2)
    assert recorded_config(run) == recorded_config(run / "rewound/1") == config
    output = str(tmp_path / "fork")
    fork(Fork(log_path=str(run), output=output), {})
    assert recorded_config(tmp_path / "fork") == chz.replace(config, log_path=output)


@pytest.mark.parametrize("has_id", [True, False])
def test_a_rewind_says_where_trackers_go_on(
    tmp_path: Path, config: Config, has_id: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path / "run", config)
    if has_id:
        (run / "wandb_id").write_text("abc")
    rewind(Rewind(log_path=str(run), generation=2))
    said = capsys.readouterr().out
    assert ("in W&B it goes on as a new run, *-rewound-1, from generation 2" in said) == has_id
    assert "Trackio" not in said
    assert not (run / "wandb_id").exists()
    assert (run / "rewound/1/wandb_id").exists() == has_id


def test_a_strangers_run_is_forked_only_when_what_it_reaches_is_named_or_left_out(
    tmp_path: Path, config: Config
) -> None:
    run, output = stranger(tmp_path / "run", config), tmp_path / "fork"
    options: dict[str, Any] = {"log_path": str(run), "output": str(output)}
    with pytest.raises(ConfigError, match="add trust=https"):
        fork(Fork(**options), {})
    assert not output.exists()
    fork(Fork(**options, trust=("https://judge.example",)), {"trackers.hub": "None"})
    assert recorded_config(output).trackers == TrackersBuilder()


def test_the_key_of_a_judge_goes_nowhere_that_the_user_did_not_name(
    tmp_path: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`play` and `resume` sent it to any address in a stranger's config."""
    monkeypatch.setenv("ES_COOKBOOK_JUDGE_KEY", "secret")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(20)))
    with chat_server(lambda _: "10") as server:
        judge = Judge(url=f"{server.url}", model="m")
        task = Task(
            source=str(rows),
            prompt="{question}",
            reward=judge,
            num_test=4,
            problems_per_generation=2,
        )
        run = stranger(tmp_path / "run", chz.replace(config, dataset=task))
        address = server.url.removesuffix("/v1")
        options = [f"log_path={run}", "problem=0", "genome=base"]
        with pytest.raises(SystemExit):
            run_cli(play, PlayConfig, options)
        said = capsys.readouterr().err
        assert "is where questions go, with the key in ES_COOKBOOK_JUDGE_KEY" in said
        assert said.endswith(f"add trust={address}\n") and server.asked == []
        run_cli(play, PlayConfig, [*options, f"trust={address}"])
        assert server.keys == ["Bearer secret"]


SCRIPT = """
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder
import chz

@chz.chz
class Problems(CountdownDatasetBuilder):
    pass
"""
BEGINNING = """
if __name__ == "__main__":
    from pathlib import Path
    from tests.runs.directory.test_trusted import begun, RECORDED
    from es_cookbook import Config
    from es_cookbook.common.configs import load_config
    base = load_config(RECORDED / "config.json", Config)
    begun(Path("run"), chz.replace(base, dataset=Problems()))
"""


def test_a_script_that_lies_as_it_lay_is_not_asked_for_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "sealed_script.py"
    script.write_text(SCRIPT + BEGINNING)
    here = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, script.name], cwd=tmp_path, env=here, check=True)
    run = tmp_path / "run"
    text = (run / "config.json").read_text()
    assert str(script) in with_sealed(run, text, [])
    assert recorded_config(run).dataset.__class__.__name__ == "Problems"
    script.write_text(SCRIPT + BEGINNING + "print('changed')\n")
    del sys.modules["sealed_script"]
    with pytest.raises(ConfigError, match=r"add trust=.*/run/scripts/sealed_script\.py$"):
        recorded_config(run)
    recorded_config(run, [str(script)])
    keep_scripts(run, text)
    assert f"{script} has changed since the run went on last" in caplog.text
    caplog.clear()
    keep_scripts(run, text)
    assert not caplog.text
    assert sorted(kept.name for kept in (run / "scripts").iterdir()) == [
        *("sealed_script.1.py", "sealed_script.py")
    ]
    del sys.modules["sealed_script"]
    script.unlink()
    with pytest.raises(ConfigError, match=r"add trust=.*/run/scripts/sealed_script\.py$"):
        recorded_config(run)
    recorded_config(run, [str(run / "scripts/sealed_script.py")])


NAMED = {
    "rows": lambda: Task(source="rows.jsonl", reward=Exact()),
    "rows of an absolute path": lambda: Task(
        source=str(Path("rows.jsonl").resolve()), reward=Exact()
    ),
    "a module": lambda: Task(source="none.jsonl", reward=module_of("an_input").reward),
    "a program": lambda: ProgramRows(source="none.jsonl", program="python program.py --fast"),
    "a program with a plain name": lambda: ProgramRows(source="none.jsonl", program="./program"),
    "servers of tools": lambda: ToolRows(source="none.jsonl", tools=TWO, reward=Exact()),
}
"""Kind of file -> what names it."""
TWO = "mcp:python server.py --fast,mcp:python other.py"
FILES = {
    "rows": "rows.jsonl",
    "rows of an absolute path": "rows.jsonl",
    "a module": "an_input.py",
    "a program": "program.py",
    "a program with a plain name": "program",
    "servers of tools": "server.py",
}


def module_of(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize("kind", NAMED)
def test_what_a_run_reads_and_has_changed_is_told_when_it_goes_on(
    tmp_path: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "an_input", raising=False)
    file = tmp_path / FILES[kind]
    for name in FILES.values():
        Path(name).write_text("def reward(text, row): return 0.0\n")
    config = chz.replace(config, dataset=NAMED[kind]())
    run = begun(tmp_path / "run", config)
    for text, says in (("", True), ("", False), ("def reward(text, row): return 1.0", True)):
        caplog.clear()
        for name in FILES.values():
            Path(name).write_text(text if name == file.name else "def reward(t, r): return 5")
        begun(run, config, (run / "config.json").read_text())
        told = [
            each for each in caplog.messages if "has changed since the run went on last" in each
        ]
        assert len(told) == says and all(file.name in each for each in told), (kind, told)
