"""Tools: functions that a model may call in the middle of a rollout.

    @tool
    def people(city: str, year: int = 2024) -> int: ...

with a docstring that describes the function and, under `Args`, each argument.

Name, description and the arguments' JSON schema come from the signature and the docstring, by
`get_json_schema` of transformers. A hint `Annotated[int, {"minimum": 1}]` adds to the schema.

A plain function runs in a worker process (`es_cookbook.rl.grading.workers`), a coroutine function
on the event loop; so does a plain one with `quick=True`, which must be done in microseconds. A call
that is not done in time ends there, and one whose rollout is cancelled is cancelled with it: a
worker process is killed.

The model sees errors of a call as text that begins with "error:": an unknown tool,
arguments that do not fit, an exception, a time-out. With `errors="lose"` an exception or time-out
of the tool loses the rollout instead, whose reward is then NaN: right for a tool whose failure is
no evidence about the genome, such as a server that is down.

Left out: results that are not text or JSON, such as images.
"""

import dataclasses
import functools
import inspect
import json
import reprlib
import sys
import typing
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, cast, overload

import anyio

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, did_you_mean, with_class
from es_cookbook.common.terminal import cut
from es_cookbook.rl.grading.workers import in_worker
from es_cookbook.rl.messages.message import ToolCall

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Function: TypeAlias = Callable[..., object] | Callable[..., Awaitable[object]]
Schema: TypeAlias = Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        function: has type hints, and a docstring that describes it and every argument.
        timeout: seconds for one call.
        quick: a plain function that runs on the event loop, in microseconds.
        errors: whether the model sees an exception or time-out, or the rollout is lost.
        max_chars: longer results are cut, and say so.
    """

    function: Function
    timeout: float = 10.0
    quick: bool = False
    errors: Literal["tell", "lose"] = "tell"
    max_chars: int = 4000

    def __post_init__(self) -> None:
        check_range(self, "timeout", above=0)
        check_range(self, "max_chars", at_least=1)
        # By which pickle finds a decorated function; a frozen dataclass takes it only so.
        self.__dict__["__module__"] = self.function.__module__

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle a decorated function by its name, and any other tool as it is."""
        module = sys.modules.get(self.function.__module__)
        if getattr(module, self.name, None) is self:
            return self.name
        return Tool, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)

    @property
    def name(self) -> str:
        return self.function.__name__

    @functools.cached_property
    def schema(self) -> Schema:
        """The tool as chat templates expect it.

        Raises:
            ConfigError: A type hint or a description is missing.
        """
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            schema = get_json_schema(self.function)
            properties = schema["function"]["parameters"]["properties"]
            for name, hint in typing.get_type_hints(self.function, include_extras=True).items():
                if name in properties:
                    for more in getattr(hint, "__metadata__", ()):
                        properties[name].update(more)
            return cast(Schema, schema)
        except Exception as error:
            raise ConfigError(
                f"the tool {self.name!r} cannot be described to a model: it needs type hints and a "
                f"docstring with every argument under Args ({str(error)[:200]})"
            ) from error

    @property
    def parameters(self) -> Schema:
        return cast(Mapping[str, Schema], self.schema["function"])["parameters"]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)  # Hashable, unlike its schema.
class ToolSchema:
    """A tool's schema for a chat template; the tool runs elsewhere."""

    name: str
    schema: Schema


class _Options(TypedDict, total=False):
    """The fields of `Tool` besides its function."""

    timeout: float
    quick: bool
    errors: Literal["tell", "lose"]
    max_chars: int


@overload
def tool(function: Function) -> Tool: ...
@overload
def tool(**options: Unpack[_Options]) -> Callable[[Function], Tool]: ...
def tool(
    function: Function | None = None, **options: Unpack[_Options]
) -> Tool | Callable[[Function], Tool]:
    """Make a tool of a function; alone or with the fields of `Tool`.

    >>> @tool(quick=True)
    ... def add(a: int, b: int = 1) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: the first
    ...         b: the second
    ...     '''
    ...     return a + b
    >>> add.name, add.parameters["required"], add(1)
    ('add', ['a'], 2)
    """
    return functools.partial(Tool, **options) if function is None else Tool(function)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of a call: text for the model, and whether the call failed."""

    text: str
    failed: bool = False


async def run_call(call: ToolCall, tools: Sequence[Tool | ToolSchema]) -> Result:
    """Run one call.

    Raises:
        Exception: What the tool raised, where its `errors` is "lose".
    """
    by_name = {tool.name: tool for tool in tools if isinstance(tool, Tool)}
    tool = by_name.get(call.name)
    if tool is None:
        return unknown_tool(call.name, by_name)
    if wrong := wrong_arguments(call.arguments, tool.parameters):
        return failed(f"{call.name}: {wrong}")
    try:
        value = await _returned(tool, call.arguments)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return Result(cut(text, tool.max_chars))
    except Exception as error:
        if tool.errors == "lose":
            raise
        return failed(cut(f"{call.name}: {with_class(error)}", tool.max_chars))


def unknown_tool(name: str, names: Collection[str]) -> Result:
    """Return the result of a call to a tool that is not among these."""
    there_are = f"{did_you_mean(name[:60], names)}; there are: {', '.join(names)}"
    return failed(f"there is no tool {name!r:.60}{there_are}")


async def _returned(tool: Tool, arguments: Mapping[str, object]) -> object:
    if inspect.iscoroutinefunction(tool.function):
        with anyio.move_on_after(tool.timeout):
            return await cast(Awaitable[object], tool(**arguments))
        raise TimeoutError(f"not done after {tool.timeout:g} s")
    if tool.quick:
        return tool(**arguments)
    return await in_worker(functools.partial(tool, **arguments), timeout=tool.timeout)


def failed(what: str) -> Result:
    """Return the result of a call that failed."""
    return Result(f"error: {what}", failed=True)


_LONGEST_REASON = 160


def wrong_arguments(arguments: Mapping[str, object], parameters: Schema) -> str | None:
    """Return the error in a call's arguments, by their JSON schema; None if they are valid.

    >>> wrong_arguments({"a": "1"}, {"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    "argument 'a': '1' is not of type 'integer'"
    """
    properties = cast(Mapping[str, Schema], parameters.get("properties") or {})
    for name in cast("Sequence[str]", parameters.get("required") or ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            hint = did_you_mean(name[:60], properties)
            accepted = ", ".join(properties) or "none"
            return f"unknown argument {name!r:.60}{hint}; accepted: {accepted}"
        schema = properties[name]
        if value is None and schema.get("nullable"):  # As `get_json_schema` writes None.
            continue
        if wrong := _wrong(value, schema):
            return f"argument {name!r}{wrong}"
    return None


def _wrong(value: object, schema: Schema) -> str | None:
    """Describe where and how a value violates a schema; None if it does not."""
    try:
        error = next(_validator()(schema).iter_errors(cast(Any, value)), None)
    except RecursionError:
        return " is nested too deeply"
    if error is None:
        return None
    place = "".join(f"[{step!r:.60}]" for step in error.absolute_path)
    if len(error.message) <= _LONGEST_REASON:
        return f"{place}: {error.message}"
    found, wanted = reprlib.repr(error.instance), reprlib.repr(error.validator_value)
    return f"{place}: {found} is against {error.validator}={wanted}"


@functools.cache
def _validator() -> "type[Validator]":
    """Return a JSON Schema validator for which 1.0 and true are not integers."""
    from jsonschema import Draft202012Validator, validators  # Takes 180 ms to import.

    checker = Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
    return validators.extend(Draft202012Validator, type_checker=checker)


def _is_integer(checker: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
