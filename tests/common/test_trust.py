"""What a config from a file may name and reach; docs/trust.md lists what is reached."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chz
import pytest

from es_cookbook import ES, Config
from es_cookbook.common.configs import load_config
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.trust import reference, resolve
from es_cookbook.plugins.judges.reward import address_of

ROOT = Path(__file__).parents[2]
CONFIG = json.loads((ROOT / "tests/data/recorded/low_rank/config.json").read_text())
TASK = {"$class": "es_cookbook.rl.data.task:Task", "source": "rows.jsonl"}
JUDGE = {"$class": "es_cookbook.plugins.judges.reward:Judge", "url": "https://evil.example:1/v1"}
SERVER = {
    "$class": "es_cookbook.plugins.judges.judges:ServerJudge",
    "url": "http://evil.example/v1",
}
EXACT = {"$class": "es_cookbook.rl.rewards.matching:Exact"}
JUDGED = TASK | {"$class": "es_cookbook.plugins.judges.task:JudgedTask", "reward": EXACT}
HUB = {"$class": "es_cookbook.plugins.hub.background_push:HubPush", "repo_id": "evil/run"}
TRACKERS = {"$class": "es_cookbook.runs.tracking.trackers:TrackersBuilder"}
WANDB = {"$class": "es_cookbook.plugins.trackers.libraries:WandbTrackerBuilder"}
TRACKIO = {"$class": "es_cookbook.plugins.trackers.libraries:TrackioTrackerBuilder"}
RAY = {"$class": "es_cookbook.engines.ray.pool:RayPoolBuilder"}
VLLM = {"$class": "es_cookbook.engines.vllm.engine:VLLMEngineBuilder"}
GAME = {
    "$class": "es_cookbook.plugins.textarena.env:TextArenaDatasetBuilder",
    "game": "TowerOfHanoi",
}
PROGRAM = {
    "$class": "es_cookbook.plugins.program.dataset:ProgramRows",
    "source": "rows.jsonl",
    "program": "rm -r .",
}
TOOLS = {
    "$class": "es_cookbook.plugins.mcp.dataset:ToolRows",
    "source": "rows.jsonl",
    "reward": EXACT,
    "tools": "mcp:rm -r .",
}
LOGIC = {"$class": "es_cookbook.recipes.logic.dataset:LogicDatasetBuilder"}
TASKSET = {
    "$class": "es_cookbook.plugins.verifiers.dataset:TasksetProblems",
    "taskset": {"$import": "tests.common.test_trust:Taskset"},
}


class Taskset:
    """Stands where a taskset does."""


PROJECT = WANDB | {"wandb_project": "p"}
FILE = LOGIC | {"options": {"$tuple": ["data_file=/etc/passwd"]}}
REACHED: tuple[tuple[str, dict[str, Any], str], ...] = (
    # The field, the part of the Config that has it, and the word.
    ("dataset.reward.url", TASK | {"reward": JUDGE | {"model": "m"}}, "https://evil.example:1"),
    ("dataset.judge.url", JUDGED | {"judge": SERVER | {"model": "m"}}, "http://evil.example"),
    ("trackers.repo_id", HUB, "hub:evil/run"),
    ("trackers.hub.repo_id", TRACKERS | {"hub": HUB}, "hub:evil/run"),
    ("trackers.wandb.wandb_project", TRACKERS | {"wandb": PROJECT}, "wandb:p"),
    ("trackers.trackio.project", TRACKERS | {"trackio": TRACKIO | {"project": "p"}}, "trackio:p"),
    ("engine.address", RAY | {"address": "evil.example:6379"}, "ray"),
    ("engine.env", RAY | {"env": {"LD_PRELOAD": "evil.so"}}, "ray"),
    ("engine.extra", VLLM | {"extra": {"worker_cls": "evil.Worker"}}, "vllm"),
    ("dataset.game", GAME, "textarena"),
    ("dataset.program", PROGRAM, f"program:{hashlib.sha256(b'rm -r .').hexdigest()[:16]}"),
    ("dataset.tools", TOOLS, f"mcp:{hashlib.sha256(b'mcp:rm -r .').hexdigest()[:16]}"),
    ("dataset.options", FILE, "options:reasoning_gym"),
    ("dataset.options", TASKSET | {"options": '{"file": "/etc/passwd"}'}, "options:tests"),
)


def read(part: str, value: object, *trust: str, typed: tuple[str, ...] = ()) -> Config:
    """The Config of a stranger's run."""
    text = json.dumps(CONFIG | {part: value})
    return load_config(Path("config.json"), Config, ["tests", *trust], typed, text)


@pytest.mark.parametrize(("field", "value", "word"), REACHED)
def test_what_a_config_reaches_is_refused_until_it_is_trusted_or_typed(
    field: str, value: dict[str, object], word: str
) -> None:
    part = field.partition(".")[0]
    for trust in ([], ["evil", "https://evil.example:10", "hub:evil/run2", "wandb:p2"]):
        with pytest.raises(ConfigError) as caught:
            read(part, value, *trust)
        said = str(caught.value)
        assert said.startswith(f"config.json: config.{field}: ") and said.isprintable()
        assert said.endswith(f"; if you trust it, add trust={word}")
    with pytest.raises(ConfigError):
        read(part, value, typed=("num_generations", f"{field}_2"))
    assert read(part, value, word) == read(part, value, typed=(field,))
    assert read(part, value, typed=(part,)) == read(part, value, word)


def test_what_reaches_nothing_is_not_asked_for() -> None:
    read("dataset", TASK | {"reward": JUDGE})  # Without a model it sends no request.
    read("dataset", TASKSET | {"options": '{"rounds": 3, "hard": true}'})
    read("dataset", LOGIC | {"options": {"$tuple": ["min_terms=3", "words=2"]}})
    read("engine", RAY)
    read("trackers", TRACKERS | {"wandb": WANDB})


def test_trusting_an_address_covers_paths_below_it_only() -> None:
    judge = JUDGE | {"model": "m"}
    read("dataset", TASK | {"reward": judge}, "https://evil.example:1/v1")
    for url in ("https://good.example@evil.example/v1", "https://good.example.evil.example/v1"):
        with pytest.raises(ConfigError, match=r"add trust=https://good\.example"):
            read("dataset", TASK | {"reward": judge | {"url": url}}, "https://good.example")
    assert address_of("http://[::1]:80/v1") == "http://[::1]:80"
    assert address_of("http://a.example\\@b.example/") == "http://a.example\\@b.example/"


def marked() -> Iterator[tuple[str, str]]:
    """Every field of the package that reaches something: its class and its name."""
    for path in sorted((ROOT / "es_cookbook").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if "needs_trust(" not in path.read_text("utf-8"):
            continue
        for thing in vars(__import__(name, fromlist=["*"])).values():
            if isinstance(thing, type) and chz.is_chz(thing) and thing.__module__ == name:
                for field in chz.chz_fields(thing).values():
                    if field.metadata and "needs_trust" in field.metadata:
                        yield thing.__name__, field.logical_name


def test_every_field_that_reaches_something_is_in_the_table_and_tried_here() -> None:
    table = (ROOT / "docs/trust.md").read_text()
    tried = {field.rpartition(".")[2] for field, _, _ in REACHED}
    for config_class, name in marked():
        assert f"`{name}`" in table or f".{name}`" in table, config_class
        assert name in tried, config_class


class Outer:
    class Inner:
        pass

    name = "outer"

    @staticmethod
    def made() -> None:
        pass


def test_classes_and_functions_come_back_by_their_names() -> None:
    for thing in (Outer, Outer.Inner, Outer.made, json.dumps, len, ES):
        module = thing.__module__
        assert resolve(reference(thing), [module]) is thing


def test_local_classes_have_no_reference() -> None:
    for thing in (lambda: 1, Outer().made.__call__):
        with pytest.raises(ConfigError, match="top level of a module"):
            reference(thing)


def test_trusting_a_package_covers_its_modules_only() -> None:
    assert resolve("json.decoder:JSONDecoder", ["json"]) is json.JSONDecoder
    assert resolve("json.decoder:JSONDecoder", ["json.decoder"]) is json.JSONDecoder
    for trust in (["jso"], ["json.dec"], ["decoder"], []):
        with pytest.raises(ConfigError, match="is not part of es_cookbook"):
            resolve("json.decoder:JSONDecoder", trust)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("es_cookbook.common.files:os.system", "has nothing called os.system"),
        ("es_cookbook.common.files:Path", "is not part of es_cookbook, but of pathlib;"),
        ("es_cookbook.common.files:os", "must be a class or a function, found module"),
        ("es_cookbook.runs.directory.directory:RunLock.release.__globals__", "in letters of ASCII"),
        ("es_cookbook.runs.directory.directory:RunLock.mro", "has nothing called RunLock.mro"),
        ("os:system", "os:system is not part of es_cookbook, but of os; if you trust all"),
        (f"es_cookbook.{'a' * 300}:X", "in letters of ASCII"),
    ],
)
def test_an_untrusted_name_is_refused_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        resolve(text)
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brittle.py").write_text("raise OverflowError('too\\nmuch')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="brittle:X cannot be imported: too much"):
        resolve("brittle:X", ["brittle"])


def test_only_the_script_itself_may_name_its_classes_as_main(tmp_path: Path) -> None:
    (tmp_path / "dish.py").write_text(
        "import chz\n"
        "from es_cookbook.common.trust import resolve\n"
        "class Dish: pass\n"
        "for name in ('__main__:Dish', f'{__spec__.name if __spec__ else \"__main__\"}:Dish'):\n"
        "    assert resolve(name) is Dish\n"
        "try: resolve('__main__:chz')\n"
        "except ValueError as error: print(error)\n"
    )
    for way in (["dish.py"], ["-m", "dish"]):
        done = subprocess.run(
            [sys.executable, *way], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout == "__main__:chz must be a class or a function, found module\n"
