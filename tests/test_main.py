"""`es-cookbook COMMAND` and `python -m es_cookbook COMMAND`: what there is, and its names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from es_cookbook.__main__ import COMMANDS, RECIPES, main
from tests.families import sampled
from tests.runs.directory.test_damaged_directories import RUNS
from tests.test_house import ROOT, loaded_by

NAMES = [*COMMANDS, *RECIPES]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Call `main` as the console script does."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/es-cookbook", *arguments])
    main()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_all_are_listed_in_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    call(monkeypatch, *arguments)
    usage, *lines = capsys.readouterr().out.splitlines()
    assert usage == "usage: es-cookbook COMMAND [name=value ...]"
    assert sorted(line.split()[0] for line in lines if line.startswith("  ")) == sorted(NAMES)


def test_the_list_imports_nothing_heavy() -> None:
    *_, loaded = loaded_by("import es_cookbook.__main__ as m; m.main()")
    assert loaded & {"chz", "numpy", "torch", "transformers"} == set()


@pytest.mark.parametrize("name", sampled(NAMES, 8))
def test_a_commands_help_names_the_program_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    call(monkeypatch, name, "--help")
    assert capsys.readouterr().out.startswith(f"usage: es-cookbook {name} ")


@pytest.mark.slow
def test_a_module_run_by_name_is_called_by_its_name(tmp_path: Path) -> None:
    for arguments, says in (
        (["es_cookbook", "frok"], "unknown command 'frok': did you mean 'fork'? Accepted: "),
        (
            ["es_cookbook", "rewind", "--help"],
            "usage: python -m es_cookbook rewind PATH [name=value",
        ),
        (
            ["tools.bundled.countdown_demonstrations", "-h"],
            "usage: python -m tools.bundled.countdown_demonstrations [name=value",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout or done.stderr).startswith(says)


HEAVY = {"torch", "transformers", "datasets", "pandas", "huggingface_hub", "vllm", "ray", "wandb"}
OPTIONS = """
import contextlib, io, sys
from es_cookbook.__main__ import COMMANDS, RECIPES, main
for name in [*COMMANDS, *RECIPES]:
    for option in ("--help", "no_such_option=1"):
        sys.argv = ["es-cookbook", name, option]
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as page:
            main()
        if option == "--help":
            assert page.getvalue().startswith("usage: "), name
"""
PARTS = """
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.names import Names
from es_cookbook.recipes.countdown.train_cli import CLIConfig
import chz
fields = [field.meta_factory for field in chz.chz_fields(CLIConfig).values()]
for names in [names for names in fields if isinstance(names, Names)]:
    for name in names.accepted:
        names.from_string(name)
config_to_json(CLIConfig())
"""


@pytest.mark.parametrize("program", [OPTIONS, PARTS], ids=["commands", "parts"])
def test_options_are_shown_checked_and_built_without_libraries_that_take_seconds(
    program: str,
) -> None:
    (loaded,) = loaded_by(program)
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(("typed", "meant"), [("rewnd", "rewind"), ("extend", "resume")])
def test_a_misspelt_command_is_one_sentence_with_the_nearest_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, typed, "log_path=runs/a")
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        f"unknown command {typed!r}: did you mean {meant!r}? Accepted: {', '.join(sorted(NAMES))}\n"
    )


PRINTING = (("es_cookbook", "--help"), ("es_cookbook", "show", str(RUNS[0])))
"""Programs that print something and end."""


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_nobody_reads_ends_the_program_without_a_word(
    words: tuple[str, ...], unbuffered: str
) -> None:
    """`... --help | head -1`, with a process and a pipe that are real."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
