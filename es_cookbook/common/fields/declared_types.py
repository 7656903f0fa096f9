"""What the declared type of a field allows, asked of values and of classes and functions.

chz's own check of types is the base of it. Stricter is that true and false are no numbers here, and
that what may be called has to be asked for by the type: `object` and `Any` stand for values alone.
"""

import collections.abc
import functools
import inspect
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, cast

import chz

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.fields.chz_fields import is_subtype, is_subtype_instance

ANYTHING: tuple[object, ...] = (object, Any)


def fits(value: object, declared: object) -> bool:
    """Whether a value is of a type.

    >>> fits((1, 2), tuple[int, ...]), fits(1, float | None), fits(True, int)
    (True, True, False)
    """
    if isinstance(value, bool):
        return any(
            arm in (bool, *ANYTHING) or any(value is literal for literal in _literals(arm))
            for arm in arms(declared)
        )
    # chz takes no function that returns a union.
    return is_subtype_instance(value, cast(Any, declared)) or (
        inspect.isfunction(value) and takes(value, declared)
    )


def item_type(declared: object, kind: type, index: int) -> object | None:
    """What item `index` of a list or tuple (`kind`) may be, where that may stand; else None.

    >>> item_type(tuple[int, str] | None, tuple, 1), item_type(int, list, 0)
    (<class 'str'>, None)
    """
    found: list[object] = []
    for arm, origin, args in _generics(declared):
        if arm in ANYTHING:
            found.append(object)
        elif origin is tuple and kind is tuple and args and args[-1] is not ...:
            found += args[index : index + 1]
        elif isinstance(origin, type) and issubclass(kind, origin):
            found.append(args[0] if args else object)
    return _union(found)


def entry_types(declared: object) -> tuple[object, object] | None:
    """What keys and values of a dict may be, where one may stand; else None."""
    pairs = [
        cast("tuple[object, object]", args) if len(args) == 2 else (object, object)
        for arm, origin, args in _generics(declared)
        if arm in ANYTHING or (isinstance(origin, type) and issubclass(dict, origin))
    ]
    return (_union([k for k, _ in pairs]), _union([v for _, v in pairs])) if pairs else None


def may_hold_object(declared: object) -> bool:
    """Whether an object of some class may stand there, and not plain values alone."""
    plain = (bool, int, float, str, NoneType, list, tuple, dict)
    return any(
        arm in ANYTHING or (isinstance(origin, type) and not issubclass(origin, plain))
        for arm, origin, _ in _generics(declared)
    )


def holds_class(found: type, declared: object) -> bool:
    """Whether an object of this class is of a type."""
    return any(is_subtype(cast(Any, found), cast(Any, arm)) for arm in arms(declared))


def may_be_called(declared: object) -> bool:
    """Whether a class or a function itself may stand there, and not only an object."""
    return any(_is_callable(origin) or origin is type for _, origin, _ in _generics(declared))


def takes(found: Callable[..., object], declared: object, partial: bool = False) -> bool:
    """Whether a class or a function, or a partial of it, is what a type asks for.

    Where a function says what it returns, that must be what is asked for.
    """
    for _, origin, args in _generics(declared):
        if origin is type and not partial and isinstance(found, type):
            if not args or is_subtype(cast(Any, found), args[0]):
                return True
        elif _is_callable(origin):
            wanted = cast(Any, args[-1] if args else Any)
            returned = arms(_returned(found))
            if wanted in ANYTHING or all(is_subtype(cast(Any, each), wanted) for each in returned):
                return True
    return False


def argument_types(
    function: Callable[..., object], args: Sequence[object], keywords: Mapping[str, object]
) -> tuple[list[object], dict[str, object]]:
    """What the arguments of a partial may be; `object` where the function does not say.

    Raises:
        ConfigError: It takes no such arguments.
    """
    try:
        signature = inspect.signature(function)
        signature.bind_partial(*args, **keywords)
    except TypeError as error:
        raise ConfigError(f"{getattr(function, '__name__', function)}: {error}") from error
    except ValueError:  # One of C that does not tell.
        return [object] * len(args), dict.fromkeys(keywords, object)
    hints = _hints(function)
    positional: list[str] = []
    others = rest = ""
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = name
        elif parameter.kind is parameter.VAR_KEYWORD:
            others = name
    names = [*positional, *[rest] * len(args)][: len(args)]
    return [hints.get(name, object) for name in names], {
        name: hints.get(name if name in signature.parameters else others, object)
        for name in keywords
    }


def _hints(function: Callable[..., object]) -> dict[str, object]:
    if chz.is_chz(function):
        return {name: field.x_type for name, field in chz.chz_fields(function).items()}
    try:
        return typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    except (NameError, TypeError):  # Of what is imported for type checkers alone; of C.
        return {}


def _returned(function: Callable[..., object]) -> object:
    if isinstance(function, type):
        return function
    returned = _hints(function).get("return", Any)
    if inspect.iscoroutinefunction(function):
        return collections.abc.Coroutine[Any, Any, cast(Any, returned)]
    return returned


def arms(declared: object) -> tuple[object, ...]:
    """The members of a union, or the type itself."""
    if typing.get_origin(declared) in (typing.Union, UnionType):
        return typing.get_args(declared)
    return (NoneType if declared is None else declared,)


def _generics(declared: object) -> list[tuple[object, object, tuple[Any, ...]]]:
    """Each arm, the class that it is of, and what stands in its brackets."""
    return [(arm, typing.get_origin(arm) or arm, typing.get_args(arm)) for arm in arms(declared)]


def _literals(arm: object) -> tuple[object, ...]:
    return typing.get_args(arm) if typing.get_origin(arm) is typing.Literal else ()


def _is_callable(origin: object) -> bool:
    return origin is collections.abc.Callable


def _union(types: Sequence[object]) -> object | None:
    return functools.reduce(operator.or_, cast("Sequence[Any]", types)) if types else None
