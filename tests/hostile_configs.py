"""Configs that a stranger may have written, and a program that opens every one of them.

    python -m tests.hostile_configs DIRECTORY

Runs in a separate process, because it installs an audit hook, which cannot be removed. Prints a
line of JSON: what was imported and run, and the messages.
"""

import contextlib
import copy
import functools
import importlib
import io
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio

from tests.families import sampled
from tests.said import after_start

RECORDED = Path(__file__).parent / "data/recorded"
CANARY = "canary"
EVIL = f"""
from pathlib import Path
Path({CANARY!r}).touch()
class Builder: pass
def run(*_, **__): Path({CANARY!r}).touch()
"""
"""A module that leaves a trace as soon as it is imported."""

_TARGETS = """
os:system posix:system subprocess:Popen builtins:eval builtins:getattr cProfile:run runpy:run_path
importlib:import_module pickle:loads functools:partial operator:methodcaller ctypes:CDLL
antigravity:fly torch.hub:load numpy:load anyio:run chz:entrypoint pip:main sitecustomize:run
transformers.dynamic_module_utils:get_class_from_dynamic_module huggingface_hub:snapshot_download
evil_env:Builder evil_env.data:Builder tests.fakes:FakeEngine
"""
TARGETS = _TARGETS.split()
NAMES = (
    # Through a module of es_cookbook to what it imports.
    *("es_cookbook.common.files:os.system", "es_cookbook:sys"),
    *("es_cookbook.common.trust:importlib.import_module", "es_cookbook.common.configs:Path"),
    # Through a class to everything else, and what is private to Python.
    "es_cookbook.runs.directory.directory:RunLock.__init__.__globals__",
    *("es_cookbook.runs.config:Config.__subclasses__", "es_cookbook.runs.config:Config.mro"),
    *("es_cookbook:__builtins__", "es_cookbook.__main__:main", "__main__:os.system"),
    # What only looks like es_cookbook, or like a name.
    *("еs_cookbook.train:Config", "es_cookbook\u200b.train:Config", " es_cookbook.runs:Config"),
    *("es_cookbook.runs:Config\n", "es_cookbook_evil:Builder", "es_cookbook:", ":Config", ""),
    # Paths, relative names, expressions.
    *("../evil_env:Builder", "/tmp/evil_env:Builder", ".evil_env:Builder", "evil_env.py:X"),
    *("es_cookbook/../evil_env:Builder", "lambda: __import__('evil_env')", "1:2"),
    # Real ones, where they do not belong.
    *("es_cookbook.runs.program:run", "es_cookbook.evolution.optimizers.es:ES"),
)

_PLUGINS = "es_cookbook.plugins"
_COMMAND = f"__import__('pathlib').Path({CANARY!r}).touch()"


def _everywhere() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield fields of a Config with something that would be run or imported."""
    for text in TARGETS:
        yield "dataset", {"$partial": text, "args": [_COMMAND], "keywords": {}}
        yield "dataset", {"$class": text}
        yield "optimizer.sigma_schedule", {"$import": text}
    for number, text in enumerate(NAMES):
        marker = ("$class", "$partial", "$import")[number % 3]
        yield ("dataset", "trackers", "kl")[number % 3], {"$class": text}
        yield ("engine", "search_space.include", "model_name")[number % 3], {marker: text}


def _deep() -> Iterator[tuple[str, Any]]:
    evil: dict[str, Any] = {"$class": "evil_env:Builder"}
    run: dict[str, Any] = {"$partial": "evil_env:run", "args": [], "keywords": {}}
    nested: dict[str, Any] = {
        "$partial": "functools:partial",
        "args": [run],
        "keywords": {"x": run},
    }
    for hidden in (evil, run, nested, {"$import": "evil_env:run"}):
        yield "search_space.include", {"$tuple": ["*", hidden]}
        yield "sampling", {"$class": "es_cookbook.rl.types:SamplingParams", "max_tokens": hidden}
        yield "dataset", {"$partial": "es_cookbook.evolution.schedules:Cosine", "args": [hidden]}
        yield "log_path", {"$dict": [[hidden, hidden]]}
        yield "preference", {"$path": hidden}
        yield "dataset.reward", {"$class": ["evil_env:Builder"], "$import": "evil_env:run"}
    yield from _by_own_functions()
    vllm = {"$class": "es_cookbook.engines.vllm.engine:VLLMEngineBuilder"}
    worker = {"extra": {"worker_cls": "evil_env.Builder"}}
    ray = {"$class": "es_cookbook.engines.ray.pool:RayPoolBuilder"}
    yield "engine", vllm | worker
    yield "engine", vllm | {"extra": {"trust_remote_code": True}}
    yield "engine", vllm | {"extra": {"hf_overrides": evil}}
    yield "engine", ray | {"address": "10.0.0.1:6379"}
    yield "engine", ray | {"env": {"LD_PRELOAD": "evil.so"}}
    yield "engine", ray | {"engine": vllm | worker}
    yield "engine", ray | {"engine": ray}


def _by_own_functions() -> Iterator[tuple[str, Any]]:
    """Yield functions of es_cookbook as rewards; each once ran a script or wrote a file."""
    task = {"$class": "es_cookbook.rl.data.task:Task", "source": "rows.jsonl"}
    script = {"trust": {"$tuple": ["evil_env.py"]}}
    for reward in (
        {"$partial": "es_cookbook.common.configs:load_fields", "args": [], "keywords": script},
        {"$import": "es_cookbook.common.configs:config_from_json"},
        {"$partial": "es_cookbook.common.trust:resolve", "args": ["evil_env:run"], "keywords": {}},
        {"$import": "es_cookbook.runs.files:replace_file"},
        {"$import": "es_cookbook.common.cli:run_cli"},
        {"$import": "__main__:main"},
        {"$class": "es_cookbook.evolution.optimizers.momentum:Momentum"},
        {"$class": f"{_PLUGINS}.judges.reward:Judge", "url": "http://10.0.0.1/v1", "model": "m"},
    ):
        yield "dataset", task | {"reward": reward}
    for name, fields in (
        ("plugins.verifiers.dataset:TasksetProblems", {"taskset": {"$import": task["$class"]}}),
        ("plugins.textarena.env:TextArenaDatasetBuilder", {"game": "evil_env"}),
        ("recipes.logic.dataset:LogicDatasetBuilder", {"options": {"$tuple": ["data_file=/etc"]}}),
    ):
        yield "dataset", {"$class": f"es_cookbook.{name}", **fields}
    yield "trackers", {"$class": f"{_PLUGINS}.hub.background_push:HubPush", "repo_id": "me/run"}


def hostile_configs() -> list[str]:
    """Return all hostile configs as the text of a config.json."""
    base = json.loads((RECORDED / "low_rank/config.json").read_text())
    texts = [json.dumps({"$format": 1, "$class": text}) for text in (*TARGETS[-4:], *NAMES[:8])]
    for path, value in (*_everywhere(), *_deep()):
        config = copy.deepcopy(base)
        *parents, name = path.split(".")
        functools.reduce(lambda part, key: part[key], parents, config)[name] = value
        texts.append(json.dumps(config))
    return list(dict.fromkeys(texts))


def _opened(directory: Path) -> dict[str, Callable[[], object]]:
    """Return the ways to open a run directory, by name."""
    from es_cookbook.cli.resume import Resume
    from es_cookbook.cli.resume import main as resume
    from es_cookbook.common.cli import run_cli
    from es_cookbook.common.configs import load_config
    from es_cookbook.plugins.branches.fork import Fork
    from es_cookbook.plugins.branches.fork import main as fork
    from es_cookbook.plugins.play.play import PlayConfig
    from es_cookbook.plugins.play.play import main as play
    from es_cookbook.runs.config import Config

    log_path, output = f"log_path={directory}", f"output={directory / 'output'}"
    return {
        "load_config": lambda: load_config(directory / "config.json", Config),
        "resume": lambda: run_cli(functools.partial(resume, fields={}), Resume, [log_path]),
        "fork": lambda: run_cli(functools.partial(fork, fields={}), Fork, [log_path, output]),
        "play": lambda: run_cli(play, PlayConfig, [log_path, "problem=0"]),
    }


NOT_LOADED = (
    *("es_cookbook.engines.vllm.", "es_cookbook.__main__"),
    # These import what takes seconds, and would be seen if a config had them imported.
    "es_cookbook.plugins.gradients.grpo.training",
    *(f"es_cookbook.plugins.verifiers.{name}" for name in ("env", "library", "tools")),
    *("es_cookbook.plugins.inspect.models", "es_cookbook.plugins.generate.by_distilabel"),
)
"""Beginnings of names of modules that are not imported beforehand."""
_RUNS = {
    *("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen")
}


def main(directory: Path) -> Mapping[str, object]:
    """Open every config in every way, and tell what happened."""
    import es_cookbook

    for module in pkgutil.walk_packages(es_cookbook.__path__, "es_cookbook."):
        with contextlib.suppress(ImportError):
            if not module.name.startswith(NOT_LOADED):
                importlib.import_module(module.name)
    importlib.import_module("es_cookbook.engines.vllm.engine")
    anyio.run(anyio.sleep, 0)  # Its backend is imported when it is first used.
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    for name in ("evil_env", "sitecustomize", "es_cookbook_evil"):
        (directory / f"{name}.py").write_text(EVIL)
    for file in (RECORDED / "low_rank").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    ways = _opened(directory)
    imported: list[str] = []
    run: list[str] = []
    watching = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "import":
            imported.append(str(arguments[0]))
        elif watching and event in _RUNS:
            run.append(f"{event} {arguments!r:.200}")

    def asked(name: str, package: str | None = None) -> object:
        if not name.startswith("es_cookbook.") and watching:
            imported.append(name)
        return import_module(name, package)

    import_module, importlib.import_module = importlib.import_module, asked
    sys.addaudithook(watch)
    said: dict[str, list[str]] = {}
    for text in sampled(hostile_configs(), 40):
        (directory / "config.json").write_text(text)
        said[text] = []
        for way, opened in ways.items():
            errors = io.StringIO()
            watching = True
            try:
                with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
                    opened()
                said[text].append(f"{way}: done")
            except SystemExit as left:
                said[text].append(f"{way}: {left.code} {after_start(errors.getvalue()).rstrip()}")
            except Exception as error:
                said[text].append(f"{way}: {type(error).__name__} {error}")
            finally:
                watching = False
    canary = (directory / CANARY).exists()
    importlib.import_module("evil_env")  # That the trace would have been left.
    return {
        "imported": imported,
        "run": run,
        "canary": canary,
        "canary_works": (directory / CANARY).exists(),
        "said": said,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
    os._exit(0)  # All that was imported takes long to be torn down.
