"""A name leads to what is defined in a trusted module, and nothing else is imported on the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.references import reference, resolve
from es_cookbook.evolution.optimizers.es import ES


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
    class Local:
        pass

    for thing in (Local, lambda: 1, Outer().made.__call__):
        with pytest.raises(ConfigError, match="top level of a module"):
            reference(thing)


def test_a_package_is_trusted_with_its_modules_and_no_other_that_begins_so() -> None:
    assert resolve("json.decoder:JSONDecoder", ["json"]) is json.JSONDecoder
    assert resolve("json.decoder:JSONDecoder", ["json.decoder"]) is json.JSONDecoder
    for trust in (["jso"], ["json.dec"], ["decoder"], []):
        with pytest.raises(ConfigError, match="is not part of es_cookbook"):
            resolve("json.decoder:JSONDecoder", trust)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("es_cookbook.common.files:os.system", "leads through something that is not a class"),
        ("es_cookbook.common.files:Path", "of pathlib.*, is not part of es_cookbook"),
        ("es_cookbook.common.files:os", "must be a class or a function, found module"),
        ("es_cookbook.runs.directory.directory:RunLock.release.__globals__", "in letters of ASCII"),
        ("es_cookbook.runs.directory.directory:RunLock.mro", "has nothing called RunLock.mro"),
        ("es_cookbook.runs.directory.directory:Owner.index", "has nothing called Owner.index"),
        ("es_cookbook.__main__:main", "in letters of ASCII"),
        ("es_cookbooks.evil:X", "there is no package es_cookbooks here"),
        ("tests.data:Builder", "tests.data:Builder is not part .* add trust=tests$"),
        ("os:system", "os:system is not part of es_cookbook; it is of Python itself"),
        ("__main__:nothing", "__main__ has nothing called nothing"),
        (f"es_cookbook.{'a' * 300}:X", "in letters of ASCII"),
    ],
)
def test_what_is_not_trusted_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        resolve(text)
    assert "\n" not in str(caught.value)


def test_a_module_that_breaks_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brittle.py").write_text("raise OverflowError('too\\nmuch')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="brittle:X cannot be imported: too much"):
        resolve("brittle:X", ["brittle"])


def test_the_script_that_was_run_may_be_named_by_itself_and_by_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "dish.py").write_text(
        "import chz\n"
        "from es_cookbook.common.references import resolve\n"
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
    profiled = "from es_cookbook.common.references import resolve; resolve('cProfile:run')"
    (tmp_path / "profiled.py").write_text(profiled)
    command = [sys.executable, "-m", "cProfile", "profiled.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "ConfigError: cProfile:run is not part of es_cookbook" in done.stderr
