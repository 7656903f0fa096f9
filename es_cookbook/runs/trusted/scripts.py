"""The scripts whose classes a run's Config names: kept beside the run, and found again there.

A run of `python my_env.py` has classes of that script in its `config.json`, as `my_env:...`. Other
programs need its code to play the run or to go on with it, so a copy of the script is kept in
`scripts/`. It is imported only where the user trusts it: `trust=runs/mine/scripts/my_env.py`. The
script itself, wherever it lies now, does as well.

Left out: what a script imports from beside it.
"""

from collections.abc import Collection
from itertools import islice
from pathlib import Path

from es_cookbook.common.configs import modules_named
from es_cookbook.common.errors import ConfigError, RunDirectoryError
from es_cookbook.common.files import read_file
from es_cookbook.common.references import is_module_name, is_script, script_of, was_run
from es_cookbook.runs.files import replace_file

SCRIPTS = "scripts"
_LARGEST = 16 * 2**20
"""Bytes of a script."""
_MOST = 256


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
            copy.rename(copy.with_name(f"{module}.{number}.py"))
        if not copy.is_file():
            copy.parent.mkdir(exist_ok=True)
            replace_file(copy, [text])


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
    return f" trust={','.join(needed)}" if needed else ""


def _named(config_json: str) -> list[str]:
    """The modules that anybody's Config names, those that may be shown and looked for."""
    try:
        return list(filter(is_module_name, modules_named(config_json)))
    except ConfigError:
        return []
