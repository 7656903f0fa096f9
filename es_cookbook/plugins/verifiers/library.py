"""A taskset of verifiers 0.4 and the environment that plays it, or why they cannot be played here.

In that library a package exports a `Taskset`, which loads `Task`s (data, and methods that score a
`Trace`), and perhaps an `Env`, which says how a task is played in several turns. The library runs
an agent's program in a *runtime*, a subprocess or a container that reaches the model over HTTP.
Here there is none: the agent is a policy in this process, and its program is the plain
loop of the library's `null` harness. Scores of messages alone are the same as there.
What needs a runtime is refused by name; the library skips such rewards without a word.

Source: https://github.com/PrimeIntellect-ai/verifiers, `verifiers/v1`.
"""

import dataclasses
import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import default_harness_id, taskset_class

from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.common.terminal import printable
from es_cookbook.common.trust import trusted_modules

Task: TypeAlias = vf.Task[Any, Any, Any]
Toolset: TypeAlias = vf.Toolset[Any, Any]

_BUILT_IN = ("verifiers", "v1", "tasksets")
_PLAIN_HARNESS = "bash"
"""The library's default harness."""
_LONGEST = 300
"""Characters of an error message that are shown."""


def said(error: BaseException) -> str:
    """Return an error's message on one line."""
    text = printable(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:_LONGEST]}".removesuffix(": ")


def find_taskset(package: str) -> type:
    """Return the class of the taskset that a package exports.

    Args:
        package: an installed package, or a module or package in the current directory.

    Raises:
        ConfigError: The package does not exist, or is not a taskset.
    """
    module = package.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    try:
        if importlib.util.find_spec(module) is None:  # The console script does not look here.
            if Path(f"{module}.py").is_file():
                trusted_modules([f"{module}.py"])
            elif Path(module, "__init__.py").is_file():
                sys.path.append(str(Path.cwd()))
        return taskset_class(package)
    except Exception as error:  # Any error of the package's code.
        raise ConfigError(
            f"environment={package} cannot be used ({said(error)}): it must be installed, or a "
            "module in this directory, and export a Taskset of verifiers.v1"
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A taskset, and JSON of options for it."""

    taskset: type
    options: str

    @property
    def package(self) -> str:
        """The package that exports it, as the library calls it."""
        parts = self.taskset.__module__.split(".")
        return parts[3] if tuple(parts[:3]) == _BUILT_IN else parts[0]

    @property
    def env(self) -> vf.Env[Any]:
        """The environment of this process, with the taskset in it.

        Raises:
            ConfigError: The options do not fit, or it cannot be played here.
        """
        return _environment(self)

    def tasks(self, most: int) -> list[Task]:
        """Return the first tasks of a taskset, at most `most`, after checks.

        Raises:
            ConfigError: As `env`, or a task needs something that is not available.
            DataError: Loading failed, there are none, or a prompt is none that can be shown.
        """
        env = self.env
        try:
            tasks = list(cast("Iterator[Task]", env.taskset.take(most)))
        except Exception as error:  # Any error of the package's code.
            why = said(error)
            raise DataError(f"the taskset {self.package} failed to load: {why}") from error
        if not tasks:
            raise DataError(f"the taskset {self.package} has no tasks")
        for task in tasks:
            refuse_unplayable(task, f"{self.package}, task {task.data.idx}")
            if task.data.prompt is None and isinstance(env, vf.SingleAgentEnv):
                raise DataError(
                    f"{self.package}, task {task.data.idx}: it has no prompt, and the package has "
                    "no environment that opens the chat"
                )
        return tasks


@functools.lru_cache(maxsize=8)
def _environment(source: Source) -> vf.Env[Any]:
    package = source.package
    try:
        given = json.loads(source.options)
        if not isinstance(given, dict) or "id" in given:
            raise ValueError("they must be a JSON object, without an id")
        config = vf.resolve_env_config({"taskset": {**given, "id": package}})
    except Exception as error:  # Any error of the library's validators.
        raise ConfigError(
            f"dataset.options do not fit the taskset {package}: {said(error)}"
        ) from error
    seats = agent_config_fields(config)
    if len(seats) != 1:
        raise ConfigError(
            f"the environment of {package} has {len(seats)} agents ({', '.join(seats)}), and "
            "only those of one agent are bridged"
        )
    if (harness := default_harness_id(package)) != _PLAIN_HARNESS:
        raise ConfigError(
            f"the taskset {package} has its own harness ({harness}), a program that is "
            "run in a runtime; only the plain loop of messages and tools is bridged"
        )
    (seat,) = seats
    raw = {seat: {"harness": {"id": "null"}}, "taskset": {**given, "id": package}}
    try:
        return vf.load_environment(vf.resolve_env_config(raw))
    except Exception as error:  # Any error of the package's code.
        raise ConfigError(f"the taskset {package} cannot be made: {said(error)}") from error


def refuse_unplayable(task: Task, where: str) -> None:
    """Refuse a task that needs more than messages and tools in this process.

    Raises:
        ConfigError: It needs a runtime, or would see other tokens than are sampled.
        DataError: Its prompt is not text.
    """
    if (needed := next(_needs(task), None)) is not None:
        raise ConfigError(
            f"{where}: {needed}, and the bridge has no runtime (a subprocess or a container); it "
            "plays tasks that are set up and scored in this process"
        )
    if rewriting := discover_decorated(task, "intercept"):
        raise ConfigError(
            f"{where}: its hook {_name(rewriting[0])!r} (@vf.intercept) rewrites messages on their "
            "way, so the model would see others than it is scored by"
        )
    for message in task.data.prompt if isinstance(task.data.prompt, list) else ():
        text_of(message, f"{where}: its prompt")


def _needs(task: Task) -> Iterator[str]:
    if task.NEEDS_CONTAINER or task.data.image is not None:
        yield "it runs in a container"
    if task.data.skills or task.data.artifacts:
        yield "it has skills or artifacts, which are files"
    hooks: dict[str, Callable[..., object]] = {}
    for kind in ("reward", "metric", "stop"):
        for hook in cast("Sequence[Callable[..., object]]", task.hooks(kind)):
            hooks[f"{kind} {_name(hook)!r}"] = hook
    for judge in task.plugged_judges():
        hooks[f"judge {judge.reward_name!r}"] = judge.score
    for name in ("setup", "finalize"):
        if getattr(type(task), name) is not getattr(vf.Task, name):
            hooks[f"method {name!r}"] = getattr(task, name)
    for what, hook in hooks.items():
        wanted = inspect.signature(hook).parameters.get("runtime")
        # As in the library, not if it has a default.
        if wanted is not None and wanted.default is inspect.Parameter.empty:
            yield f"its {what} takes a runtime"
    for toolset in cast("Sequence[Toolset]", type(task).toolsets(task.config)):
        runtime = getattr(toolset.config, "runtime", None)
        is_here = isinstance(runtime, SubprocessConfig | None)
        if getattr(toolset.config, "url", None) or not is_here:
            yield f"its tools {type(toolset).__name__} are on a server or in a container"


def _name(hook: Callable[..., object]) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def text_of(message: vf.Message, what: str) -> str:
    """Return the text of a message.

    Raises:
        DataError: `what` holds something else, an image for example.
    """
    content = message.content
    if isinstance(content, list):
        others = {part.type for part in content} - {"text"}
        if others:
            raise DataError(
                f"{what} has a part of the kind {others.pop()!r}, and only text is bridged"
            )
        return "\n".join(part.text for part in content if isinstance(part, vf.TextContentPart))
    return content or ""
