"""`trust=`: limits on what a config from a file may name and reach.

A class or function is written as "module:qualname". Following such a name imports the module, which
runs its code. So a name from a file is checked as text first: its module must belong to es_cookbook
or to a package or script in `trust`, and every piece must be a plain identifier. The object must
also be defined there, not only imported there: `os` is an attribute of many modules, and everything
can be reached from it. `es_cookbook.common.configs` restricts it further, by the field's type.

A class of a script is recorded under the name that the script has as a module, so that other
programs can import it: `Env` of `recipes/my_env.py` is `my_env:Env`. A script is trusted by its
path.

A field that reaches something (an address, a repository, an account) is marked by `needs_trust`
with the word that allows it, for example `trust=https://judge.example`. A value that is typed on
the command line or written in Python is allowed; a value from a config file is refused until
`trust=` names its word.

Left out: checking what the code of a trusted package does.
"""

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

from es_cookbook.common.errors import ConfigError, did_you_mean
from es_cookbook.common.registry import part, parts_of, whose
from es_cookbook.common.terminal import printable

ANYTHING_REACHED = "(anything)"
"""In `trust`: all that a config reaches, if it is this process's own or only compared."""
_OWN = "es_cookbook"
_MAIN = ("__main__", "__mp_main__")
"""Names of the module that was run, in the process and in those that it spawns."""
_SCRIPT = ".py"
_IDENTIFIER = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*")
"""ASCII only: Python takes some other letters of Unicode for the same."""
_LONGEST = 300
"""Characters of a name that is followed."""
_NEEDS_TRUST = "needs_trust"
_scripts: dict[str, Path] = {}
"""Name of a module -> the trusted script that it is."""
_importing: list[str] = []
"""Modules that are being imported because a config names them."""
_Named = type | FunctionType | BuiltinFunctionType
"""What has a name in a module."""


def reference(thing: Callable[..., object]) -> str:
    """Return the "module:qualname" of an importable class or function, as `resolve` takes it.

    >>> import json
    >>> reference(json.JSONDecoder)
    'json.decoder:JSONDecoder'

    Raises:
        ConfigError: A lambda, a local or anything else that importing does not give back.
    """
    module = getattr(thing, "__module__", None)
    text = _with_real_module(f"{module}:{getattr(thing, '__qualname__', None)}")
    found = None
    with contextlib.suppress(ConfigError):
        found = resolve(text, trust=[str(module)])
    if found is not thing:
        raise ConfigError(
            f"{thing!r} cannot be written to a config because it cannot be imported again; "
            "define it by name at the top level of a module"
        )
    return text


def resolve(text: str, trust: Collection[str] = ()) -> Callable[..., object]:
    """Import what "module:qualname" names, from es_cookbook or a package in `trust`.

    The module that was run is trusted too: its code runs already.

    Args:
        text: text from anywhere.
        trust: names of packages or modules; a package stands for all of its modules.

    Raises:
        ConfigError: The module is not trusted (says what `trust=` would allow), or no class or
            function of that name is defined in it; names the nearest.
    """
    module_name, _, qualname = text.partition(":")
    own = (*_MAIN, _name_of_main())
    names = qualname if module_name in _MAIN else f"{module_name}.{qualname}"
    if len(text) > _LONGEST or not all(map(_IDENTIFIER.fullmatch, names.split("."))):
        raise ConfigError(
            "a class or function is written as module:name, in letters of ASCII, digits and single "
            f"underscores, found {text!r:.200}"
        )
    packages = (_OWN, *trust, *filter(None, own))
    _check_trusted(module_name, packages, text)
    module = _imported("__main__" if module_name in own else module_name, text)
    found = _defined(module, qualname, text)
    _check_trusted(found.__module__, packages, text)
    return found


def load(text: str) -> Callable[..., object]:
    """Import the class or function that a distribution has registered as "module:name".

    Raises:
        ConfigError: It cannot be imported, or is not there; names the distribution. Or its name is
            registered twice, or for another version of the interface (`registry.part`).
    """
    registered = parts_of(text)[:1]
    for each in registered:
        part(each.group, each.name)
    try:
        return resolve(text, trust=[text.partition(":")[0]])
    except ConfigError as error:
        of = "".join(f" (of {whose(each)})" for each in registered)
        raise ConfigError(f"{error}{of}") from error


def source_of(text: str) -> Path | None:
    """Return the file of a "module:name" without importing it; None if there is none."""
    package, *inner = text.partition(":")[0].split(".")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent.joinpath(*inner) if inner else Path(found.origin)
    candidates = (file, file.with_suffix(".py"), file / "__init__.py")
    return next((each for each in candidates if each.is_file()), None)


def is_own(text: str) -> bool:
    """Return whether a "module:qualname" is of es_cookbook, also as the program that was run."""
    return _belongs_to(_with_real_module(text).partition(":")[0], (_OWN,))


def _with_real_module(text: str) -> str:
    """Return a "module:qualname" with the real name of the module that was run, if any."""
    module_name, colon, qualname = text.partition(":")
    real_name = _name_of_main() if module_name in _MAIN else None
    return f"{real_name or module_name}{colon}{qualname}"


def typed(text: str) -> Callable[..., object]:
    """Import the class or function that a user typed: "module:name" or "path/script.py:name".

    A module's file in the current directory is taken as a script. Typed names are trusted.

    Raises:
        ConfigError: There is none.
    """
    module_name, _, name = text.rpartition(":")
    is_script = module_name.endswith(_SCRIPT)
    path = Path(module_name if is_script else f"{module_name}{_SCRIPT}")
    if is_script or (path.is_file() and module_name not in sys.modules):
        module_name = _module_of(path)
    return resolve(f"{module_name}:{name}", trust=[module_name])


def trusted_modules(trust: Collection[str]) -> tuple[str, ...]:
    """Return the modules and packages that a user trusts; a script, given by path, is a module.

    Other words (an address, a repository) stay as they are.

    Raises:
        ConfigError: A script is missing, or has the name of another module.
    """
    return tuple(_module_of(Path(name)) if name.endswith(_SCRIPT) else name for name in trust)


def script_of(module_name: str) -> Path | None:
    """Return the file of a module if it is a script that was run or is trusted, else None."""
    main = sys.modules["__main__"]
    is_main = module_name == _name_of_main() and main.__spec__ is None
    return Path(str(main.__file__)) if is_main else _scripts.get(module_name)


def _module_of(path: Path) -> str:
    """Make a script importable, and return its name as a module."""
    name, here = path.stem, path.resolve()
    if not (path.is_file() and _IDENTIFIER.fullmatch(name)):
        raise ConfigError(f"there is no script {path} with a name that Python can import")
    if name == _name_of_main():
        return name
    if (folder := str(here.parent)) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.find_spec(name)
    if spec is None or Path(str(spec.origin)).resolve() != here:
        raise ConfigError(
            f"{path}: another module is called {name}, and it cannot be both; give the "
            "script, and its classes in config.json, another name"
        )
    _scripts[name] = here
    return name


def _imported(name: str, text: str) -> ModuleType:
    _importing.append(name)
    try:
        return importlib.import_module(name)
    except Exception as error:  # Any error of the module's own code.
        said = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            said += f"; if it is a script, trust it by its path: trust=.../{name}{_SCRIPT}"
        raise ConfigError(f"{text} cannot be imported: {said}") from error
    finally:
        _importing.pop()


def refuse_while_imported() -> None:
    """Refuse to run a program while a module that a config names is being imported.

    Raises:
        ConfigError: The module starts a run at its top level.
    """
    if _importing:
        raise ConfigError(
            "it starts to work when it is imported; put that behind `if __name__ == '__main__':`"
        )


def _belongs_to(module_name: str, packages: Collection[str]) -> bool:
    """Return whether a module is one of these packages or modules, or inside one."""
    return any(module_name == name or module_name.startswith(f"{name}.") for name in packages)


def _check_trusted(module_name: str, packages: Collection[str], text: str) -> None:
    if not _belongs_to(module_name, packages):
        package = module_name.partition(".")[0]
        raise ConfigError(
            f"{text} is not part of es_cookbook, but of {package}; if you trust all of its code, "
            f"add trust={package}, or trust=path/to/{package}{_SCRIPT} if that is a script"
        )


def _defined(module: ModuleType, qualname: str, text: str) -> _Named:
    """Look up a name in a module, through classes alone; inherited names do not count."""
    found: object = module
    for piece in qualname.split("."):
        known = vars(found) if found is module or isinstance(found, type) else {}
        if piece not in known:
            hint = did_you_mean(piece, known)
            raise ConfigError(f"{text.partition(':')[0]} has nothing called {qualname}{hint}")
        found = getattr(found, piece)
    if not isinstance(found, _Named):
        raise ConfigError(f"{text} must be a class or a function, found {type(found).__name__}")
    return found


def _name_of_main() -> str | None:
    """Return the name by which `__main__` can be imported; None for Python's own and a prompt."""
    main = sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "")
    script = file.stem if file.suffix == _SCRIPT and _IDENTIFIER.fullmatch(file.stem) else None
    name = main.__spec__.name if main.__spec__ else script
    return None if name and name.partition(".")[0] in sys.stdlib_module_names else name


class Reached(NamedTuple):
    """One field that reaches something: where, the word that allows it, and what it would do."""

    where: str
    word: str
    sentence: str


def needs_trust(word: Callable[[Any], str | None], does: str) -> dict[str, object]:
    """Return the metadata of a field that reaches something.

    Args:
        word: returns what `trust=` has to name, given the object that has the field; None if its
            value reaches nothing.
        does: a clause about the value, for the sentence.
    """
    return {_NEEDS_TRUST: (word, does)}


def reached(part: object, where: str = "config") -> Iterator[Reached]:
    """Yield what the fields of a chz object reach, without those of its parts."""
    import chz  # The list of commands does without it.

    for name, field in chz.chz_fields(part).items():
        if needs := (field.metadata or {}).get(_NEEDS_TRUST):
            word, does = cast("tuple[Callable[[object], str | None], str]", needs)
            if (said := word(part)) is not None:
                path, value = f"{where}.{name}", printable(f"{getattr(part, name)!r:.200}")
                yield Reached(path, printable(said), f"{path}: {value} {does}")


def check_reached(
    found: Collection[Reached], trust: Collection[str], typed: Collection[str] = ()
) -> None:
    """Refuse what a config reaches if the user has not named it.

    Args:
        found: all that the config reaches.
        trust: words of the user; an address allows everything below it.
        typed: options that the user gave, which may reach anything.

    Raises:
        ConfigError: Names the first field that reaches something, and all words that are missing.
    """
    refused: list[Reached] = []
    for each in found:
        path = f"{each.where.partition('.')[2]}."
        is_typed = any(path.startswith(f"{name}.") for name in typed)
        if not is_typed and not any(f"{said}/".startswith(f"{each.word}/") for said in trust):
            refused.append(each)
    if refused and ANYTHING_REACHED not in trust:
        words = ",".join(dict.fromkeys(f"{each.word:.200}" for each in refused))
        raise ConfigError(f"{refused[0].sentence}; if you trust it, add trust={words:.300}")


def is_plain_option(value: object) -> bool:
    """Return whether a library's option is a number, true, false, None, or a list of these.

    Text could be a path or the name of a module, so a config from a file needs trust for it.

    >>> is_plain_option([3, None]), is_plain_option("Hangman-v0"), is_plain_option({"id": 1})
    (True, False, False)
    """
    if isinstance(value, list | tuple):
        return all(map(is_plain_option, cast("list[object]", value)))
    return value is None or isinstance(value, int | float)
