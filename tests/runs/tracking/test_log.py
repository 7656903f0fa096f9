"""What libraries say is in a run's log; what the package or a script says is seen."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIBRARY = """
import logging, sys, warnings
own = logging.getLogger("noisy")
own.addHandler(logging.StreamHandler())  # As transformers has one: it keeps today's stderr.
own.propagate = False

def talk(when):
    own.warning("%s, by its own handler", when)
    logging.getLogger("quiet").warning("%s, by the root's handler", when)
    warnings.warn(f"{when}, by Python", stacklevel=1)
    print(f"{when}, printed", file=sys.stderr)
    for step in range(3):
        sys.stderr.write(f"\\r{when}, {step} of 3")
    sys.stderr.write("\\n")
"""
SCRIPT = """
import logging, sys, warnings
from pathlib import Path
from es_cookbook.common.terminal import as_program, say
from es_cookbook.runs.setup import libraries_quiet, library_log

def run():
    with library_log(Path(sys.argv[1])):
        say("loading")
        with libraries_quiet():
            import noisy
            noisy.talk("early")
            say("still\\x1b[2J loading")
            print("a script's own", file=sys.stdout)
        logging.getLogger("es_cookbook.engines").warning("an engine is lost")
        logging.getLogger("es_cookbook.engines").info("a detail")
        logging.getLogger("script").warning("a script's warning")
        warnings.warn("a script's, by Python")
        noisy.own.warning("late \\udcff, by its own handler")
        logging.getLogger("quiet").info("late and not said")
    noisy.own.warning("afterwards")

if sys.argv[2] == "program":
    run = as_program()(run)
run()
"""


def run(tmp_path: Path, how: str) -> tuple[list[str], str]:
    """What stood on stderr, and in the log."""
    libraries = tmp_path / "site-packages"
    libraries.mkdir()
    (libraries / "noisy.py").write_text(LIBRARY)
    script, log = tmp_path / "script.py", tmp_path / "log.txt"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, log, how],
        env={"PYTHONPATH": f"{ROOT}:{libraries}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a script's own\n"
    return done.stderr.splitlines(), log.read_text() if log.exists() else ""


def test_a_command_shows_what_is_said_to_its_user_and_logs_what_libraries_say(
    tmp_path: Path,
) -> None:
    seen, log = run(tmp_path, "program")
    assert [line for line in seen if not line.endswith('by Python")')] == [
        "loading",
        r"still\x1b[2J loading",
        "an engine is lost",
        "a script's warning",
        f"{tmp_path / 'script.py'}:18: UserWarning: a script's, by Python",
        "afterwards",  # No log is there any more.
    ]
    for how in ("by its own handler", "by the root's handler", "by Python", "printed"):
        assert log.count(f"early, {how}") == 1, how
    assert "es_cookbook.engines: a detail\n" in log
    assert "late \\udcff, by its own handler\n" in log and "not said" not in log
    assert "of 3" not in log, "progress bars are no lines"


def test_a_script_that_uses_a_part_keeps_its_own_way(tmp_path: Path) -> None:
    seen, log = run(tmp_path, "script")
    assert log == "" and "loading" not in seen
    assert {"early, by its own handler", "an engine is lost", "early, 2 of 3"} <= set(seen)
