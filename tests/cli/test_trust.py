"""Opening a stranger's run directory runs no code but es_cookbook's and what is trusted."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from es_cookbook.checkpoints.models import load_architecture, load_causal_lm
from es_cookbook.cli.export import ExportConfig, export
from es_cookbook.common.cli import run_cli
from es_cookbook.common.configs import config_to_json, load_config, trust_option
from es_cookbook.common.errors import ConfigError, ModelError
from es_cookbook.plugins.branches.fork import Fork
from es_cookbook.plugins.branches.fork import main as fork
from es_cookbook.plugins.play.play import PlayConfig
from es_cookbook.plugins.play.play import main as play
from es_cookbook.runs.config import Config, recorded_config
from es_cookbook.runs.tracking.trackers import TrackersBuilder
from tests.chat_server import chat_server
from tests.hostile_configs import RECORDED, hostile_configs

ROOT = Path(__file__).parents[2]


def test_every_hostile_config_is_refused_in_one_sentence(tmp_path: Path) -> None:
    texts = hostile_configs()
    for text in texts:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "config.json", Config)
        said = str(caught.value)
        assert said.isprintable() and len(said) < 600, text


@pytest.mark.slow
def test_opening_a_hostile_run_imports_and_runs_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile_configs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["canary_works"] and not found["canary"]
    of_the_hub = "huggingface_hub.utils._validators"  # It checks names of repositories.
    assert found["run"] == []
    assert set(found["imported"]) <= {"es_cookbook", "__main__", of_the_hub}
    refused = {"load_config: ConfigError"} | {f"{way}: 1" for way in ("resume", "fork", "play")}
    for text, said in found["said"].items():
        assert {" ".join(words.split()[:2]) for words in said} >= refused, text
        assert all(words.isprintable() for words in said), text


def recorded(tmp_path: Path, **fields: object) -> Path:
    """A copy of a recorded run, with some fields of its Config changed."""
    run = shutil.copytree(RECORDED / "low_rank", tmp_path / "run")
    plain = json.loads((run / "config.json").read_text())
    plain["model_name"] = str(ROOT / plain["model_name"])
    (run / "config.json").write_text(json.dumps(plain | fields))
    return run


JUDGE = {"$class": "es_cookbook.plugins.judges.reward:Judge", "model": "m"}
TASK = {"$class": "es_cookbook.rl.data.task:Task", "source": "rows.jsonl", "prompt": "{question}"}
PUSHED = {
    "$class": "es_cookbook.runs.tracking.trackers:TrackersBuilder",
    "hub": {"$class": "es_cookbook.plugins.hub.background_push:HubPush", "repo_id": "me/run"},
}


def test_a_run_is_forked_only_if_what_it_reaches_is_named_or_left_out(tmp_path: Path) -> None:
    judge = JUDGE | {"url": "https://judge.example/v1"}
    run = recorded(tmp_path, dataset=TASK | {"reward": judge}, trackers=PUSHED)
    options: dict[str, Any] = {"log_path": str(run), "output": str(tmp_path / "fork")}
    with pytest.raises(
        ConfigError, match=r"\.url: .* add trust=https://judge\.example,hub:me/run$"
    ):
        fork(Fork(**options), {})
    assert not (tmp_path / "fork").exists()
    fork(Fork(**options, trust=("https://judge.example",)), {"trackers.hub": "None"})
    forked = recorded_config(tmp_path / "fork", ["https://judge.example"])
    assert forked.trackers == TrackersBuilder()
    assert trust_option(config_to_json(forked)) == {"trust": "https://judge.example"}


def test_the_key_of_a_judge_goes_only_to_addresses_that_the_user_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`play` and `resume` sent it to any address in a stranger's config."""
    monkeypatch.setenv("ES_COOKBOOK_JUDGE_KEY", "secret")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(20)))
    with chat_server(lambda _: "10") as server:
        sizes = {"source": str(rows), "num_test": 4, "problems_per_generation": 2}
        task = TASK | sizes | {"reward": JUDGE | {"url": server.url}}
        address = server.url.removesuffix("/v1")
        options = [f"log_path={recorded(tmp_path, dataset=task)}", "problem=0", "genome=base"]
        with pytest.raises(SystemExit):
            run_cli(play, PlayConfig, options)
        said = capsys.readouterr().err
        assert "is where questions go, with the key in ES_COOKBOOK_JUDGE_KEY" in said
        assert said.endswith(f"add trust={address}\n") and server.asked == []
        run_cli(play, PlayConfig, [*options, f"trust={address}"])
        assert server.keys == ["Bearer secret"]


CPU = torch.device("cpu")


def test_code_of_a_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask
    model = shutil.copytree(ROOT / "es_cookbook/recipes/countdown/model", tmp_path / "model")
    (model / "modeling.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    shape = json.loads((model / "config.json").read_text())
    classes = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    shape |= {"model_type": "evil", "auto_map": classes, "architectures": ["M"]}
    (model / "config.json").write_text(json.dumps(shape))
    run = recorded(tmp_path, model_name=str(model))
    with pytest.raises(ModelError, match="custom code which must be executed"):
        export(ExportConfig(log_path=str(run), output=str(tmp_path / "exported")))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "evil/kernels"},
        {"_attn_implementation": {"": "sdpa", "text_config": "evil/kernels@main"}},
        {"text_config": {"experts_implementation": "evil/kernels:run"}},
    ],
)
def test_kernels_that_a_model_names_are_not_fetched(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    model = shutil.copytree(ROOT / "es_cookbook/recipes/countdown/model", tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | fields))
    for load in (load_architecture, lambda name: load_causal_lm(name, "auto", CPU)):
        with pytest.raises(ModelError, match=r"has kernels of others run, as .*_implementation"):
            load(str(model))
