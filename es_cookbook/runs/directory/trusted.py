"""Which run directories are this user's own, and the scripts whose classes their Configs name.

A file cannot prove who made it, so the machine remembers. When a run begins, its Config is the
user's word: typed, written in Python, or read from a file and refused until the user named all that
it reaches. `seal` in the run directory is an HMAC of config.json, and of the scripts that it needs,
under a secret that only this user has. So what a sealed config names is not asked for again:
addresses, repositories, trackers, and a script that lies where it lay, as it was.

A copy on another machine, a changed config.json and a stranger's run have no valid seal. Without a
directory for the secret nothing is sealed, and runs work as before.

A run of `python my_env.py` has classes of that script in its `config.json`, as `my_env:...`. Other
programs need its code to play the run or to go on with it, so a copy of the script is kept in
`scripts/`. It is imported only where the user trusts it: `trust=runs/mine/scripts/my_env.py`. The
script itself, wherever it lies now, does as well. Left out: what a script imports from beside it.

Of other files that a Config names (rows, programs, servers of tools, modules of the user's) digests
are kept in `inputs.json`, by which a run that goes on tells which have changed. Left out:
directories.
"""

import hashlib
import hmac
import importlib.metadata
import json
import logging
import os
import re
import secrets
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import cast

from es_cookbook.common.configs import config_from_json, modules_named, own_words, trust_of
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.fields.reach import reached
from es_cookbook.common.files import LARGEST_CONFIG, parsed, read_file
from es_cookbook.common.references import (
    is_module_name,
    is_script,
    references_in,
    script_of,
    was_run,
)
from es_cookbook.common.registry import parts_of
from es_cookbook.common.terminal import one_line
from es_cookbook.runs.files import replace_file

SEAL = "seal"
SCRIPTS = "scripts"
INPUTS = "inputs.json"
_DISTRIBUTION = "distribution "
_STATE = "ES_COOKBOOK_STATE"
"""Environment variable with the directory of the secret."""
_LARGEST = 16 * 2**20
"""Bytes of a script."""
_MOST = 256
_MOST_READ = 2**26
"""Bytes of a file that count in its digest."""
_LONGEST_PATH = 4096
_BETWEEN = re.compile(r"[\s,'\"]+")
"""Words of commands."""

logger = logging.getLogger(__name__)


def seal(log_path: Path, config_json: str) -> None:
    """Seal a Config that is the user's own word, with the scripts of this process that it names.

    Raises:
        RunDirectoryError: The disk refuses.
    """
    if (secret := _secret()) is None:
        return
    scripts: dict[str, list[str]] = {}
    for module in modules_named(config_json):
        script = script_of(module)
        if script is not None and script.is_file():
            scripts[module] = [str(script.resolve()), _digest(script.read_bytes())]
    plain = {"scripts": scripts, "hmac": _code(secret, config_json, scripts)}
    replace_file(log_path / SEAL, [json.dumps(plain, indent=2).encode()])


def with_sealed(log_path: Path, config_json: str, trust: Collection[str]) -> tuple[str, ...]:
    """What is trusted, and what the Config of a run needs beside it if this user sealed it."""
    if (scripts := _sealed_scripts(log_path, config_json)) is None:
        return tuple(trust)
    given = {Path(name).stem for name in trust if is_script(name)}
    lying = (str(path) for module, path in scripts.items() if module not in given)
    return (*trust, *own_words(config_json), *lying)


def is_own_word(log_path: Path, recorded: str, now: str) -> bool:
    """Whether a recorded Config may be sealed: it was, or names nothing beyond this process's own.

    Args:
        log_path: of the run that goes on.
        recorded: its Config, of whoever wrote it.
        now: the Config with which this process goes on.
    """
    if _sealed_scripts(log_path, recorded) is not None:
        return True
    try:
        then, own = (config_from_json(text, trust_of(now)) for text in (recorded, now))
        return {each.word for each in reached(then)} <= {each.word for each in reached(own)}
    except ConfigError:
        return False


def _sealed_scripts(log_path: Path, config_json: str) -> Mapping[str, Path] | None:
    """Name of a module -> its script, where that lies as it was; None if there is no valid seal."""
    try:
        plain = cast(
            "Mapping[str, object]", parsed(read_file(log_path / SEAL, LARGEST_CONFIG, log_path))
        )
        scripts = cast("dict[str, list[str]]", plain["scripts"])
        said, secret = str(plain["hmac"]), _secret()
        if secret is None or not hmac.compare_digest(said, _code(secret, config_json, scripts)):
            return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return {module: Path(path) for module, (path, digest) in scripts.items() if _is(path, digest)}


def _is(path: str, digest: str) -> bool:
    try:
        return Path(path).is_file() and _digest(Path(path).read_bytes()) == digest
    except OSError:
        return False


def _code(secret: bytes, config_json: str, scripts: Mapping[str, list[str]]) -> str:
    what = json.dumps([config_json, scripts], sort_keys=True)
    return hmac.new(secret, what.encode(), hashlib.sha256).hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _secret() -> bytes | None:
    """This user's, made once; None where there is no place for it."""
    path = _state() / "secret"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        if not path.exists():
            with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_bytes(32))
            try:
                os.link(beside, path)  # The first of several processes makes it.
            except FileExistsError:
                pass
            finally:
                beside.unlink()
        secret = path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: of a user without a home.
        return None
    return secret if len(secret) >= 32 else None


def _state() -> Path:
    if given := os.environ.get(_STATE):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "es_cookbook"


def keep_scripts(log_path: Path, config_json: str) -> None:
    """Copy the scripts of this process that a Config names; a former copy that differs stays too.

    Raises:
        RunDirectoryError: The disk refuses.
    """
    for module in modules_named(config_json):
        script, copy = script_of(module), kept_script(log_path, module)
        if script is None or not script.is_file():
            continue
        text = read_file(script, _LARGEST, None)
        if copy.is_file() and read_file(copy, _LARGEST, log_path) != text:
            number = 1 + sum(1 for _ in copy.parent.glob(f"{module}.*.py"))
            former = copy.rename(copy.with_name(f"{module}.{number}.py"))
            logger.warning(
                "%s has changed since the run went on last: from here on it is used as it is now, "
                "and as it was it is kept in %s",
                *(script, former),
            )
        if not copy.is_file():
            copy.parent.mkdir(exist_ok=True)
            replace_file(copy, [text])


def keep_inputs(log_path: Path, config_json: str) -> None:
    """Keep digests of the files that a Config names, and warn of those that have changed.

    Of parts that plug in it is their distribution, and its version.

    Raises:
        RunDirectoryError: The disk refuses.
    """
    before = _kept_inputs(log_path)
    registered = chain.from_iterable(map(parts_of, references_in(json.loads(config_json))))
    found = {
        f"{_DISTRIBUTION}{part.distribution}": part.version
        for part in registered
        if not part.is_own
    }
    for path in _inputs(log_path, config_json):
        with suppress(OSError):
            found[str(path)] = _summary(path)
    for name in (name for name in found if before.get(name, found[name]) != found[name]):
        logger.warning(
            "%s has changed since the run went on last: from here on it is used as it is now", name
        )
    if found != before:
        replace_file(log_path / INPUTS, [json.dumps(found, indent=2).encode()])


def missing_distributions(log_path: Path) -> Sequence[str]:
    """Those of which the run in a directory has parts, and which are not installed here."""
    missing: list[str] = []
    for name, version in _kept_inputs(log_path).items():
        if name.startswith(_DISTRIBUTION):
            distribution = name.removeprefix(_DISTRIBUTION)
            try:
                importlib.metadata.version(distribution)
            except (importlib.metadata.PackageNotFoundError, ValueError):
                missing.append(one_line(f"{distribution} {version}"))
    return missing


def _kept_inputs(log_path: Path) -> dict[str, object]:
    """What was kept; nothing where that cannot be read."""
    try:
        kept = parsed(read_file(log_path / INPUTS, LARGEST_CONFIG, log_path))
    except (OSError, ValueError, RecursionError, RunDirectoryError):
        return {}
    return cast("dict[str, object]", kept) if isinstance(kept, dict) else {}


def _inputs(log_path: Path, config_json: str) -> Iterator[Path]:
    """The files that a Config names: in texts, as commands have them, and as modules."""
    texts = set(_texts(json.loads(config_json)))
    words = {word.removeprefix("mcp:") for text in texts for word in _BETWEEN.split(text)}
    for word in sorted(texts | words):
        path = Path(word).expanduser() if len(word) <= _LONGEST_PATH else Path()
        with suppress(OSError, ValueError, RuntimeError):
            is_own = path.resolve().is_relative_to(log_path.resolve())
            if ("." in word or "/" in word) and path.is_file() and not is_own:
                yield path
    for module in _named(config_json):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and module.partition(".")[0] != "es_cookbook" and script_of(module) is None:
            yield Path(file)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        each: Iterable[object]
        each = value.values() if isinstance(value, dict) else cast("list[object]", value)
        yield from chain.from_iterable(map(_texts, each))


def _summary(path: Path) -> str:
    """Of a large file its beginning and its size."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_MOST_READ)).hexdigest()
    return f"{digest} {path.stat().st_size}"


def copy_scripts(log_path: Path, to: Path) -> None:
    """Copy what is kept of scripts to another run directory.

    Raises:
        RunDirectoryError: There are too many, one is no regular file or too large, or the disk
            refuses.
    """
    scripts = sorted(islice((log_path / SCRIPTS).glob("*.py"), _MOST + 1))
    if len(scripts) > _MOST:
        raise RunDirectoryError(f"{log_path / SCRIPTS} holds more than {_MOST} scripts")
    for script in scripts:
        text = read_file(script, _LARGEST, log_path)
        (to / SCRIPTS).mkdir(exist_ok=True)
        replace_file(to / SCRIPTS / script.name, [text])


def kept_script(log_path: Path, module_name: str) -> Path:
    """Where the copy of a script is, if there is one."""
    return log_path / SCRIPTS / f"{module_name}.py"


def scripts_not_trusted(
    log_path: Path, config_json: str, trust: Collection[str] = ()
) -> list[Path]:
    """The copies of scripts that a Config needs beside those that are trusted; anybody's Config."""
    trusted = {Path(name).stem for name in trust if is_script(name)}
    trusted |= {name for name in trust if not is_script(name)}
    copies = [kept_script(log_path, name) for name in _named(config_json) if name not in trusted]
    return [copy for copy in copies if copy.is_file() and not was_run(copy.stem)]


def trust_option(log_path: Path, config_json: str) -> str:
    """` trust=...`, for a command that is shown to the user; "" if the Config needs none."""
    needed: dict[str, None] = {}
    for module in _named(config_json):
        copy, package = kept_script(log_path, module), module.partition(".")[0]
        if package != "es_cookbook":
            needed[str(copy) if copy.is_file() else package] = None
    return f" trust={shlex.quote(','.join(needed))}" if needed else ""


def _named(config_json: str) -> list[str]:
    """The modules that anybody's Config names, those that may be shown and looked for."""
    try:
        return list(filter(is_module_name, modules_named(config_json)))
    except ConfigError:
        return []
