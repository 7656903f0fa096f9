"""One can talk to a run: by hand at a terminal, and from a script through a pipe."""

import json
import os
import pty
import select
import subprocess
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import one_line
from es_cookbook.rl.types import Action, Observation, SamplingParams
from es_cookbook.runs.program import train
from es_cookbook.runs.recorded import RebuiltRun, open_run, rebuild
from es_cookbook.runs.tracking.jsonl import JsonlTrackerBuilder
from tests.fakes import FakeEngineBuilder
from tests.programs import Programs
from tests.said import after_start, typed
from tests.tiny_run import TinyConfig, write_tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of four generations."""
    return run(tmp_path_factory.mktemp("play"))


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the engine that answers at once."""
    return run(tmp_path_factory.mktemp("play"), engine=FakeEngineBuilder())


def run(path: Path, **fields: Any) -> Path:
    """A run of a model, which is made if it is not there."""
    model, log_path = path / "model", path / "run"
    if not model.exists():
        write_tiny_model(model)
    fields |= {"num_generations": 4, "trackers": JsonlTrackerBuilder()}
    anyio.run(train, TinyConfig(model_name=str(model), log_path=str(log_path), **fields))
    return log_path


def command(log_path: Path, *options: str) -> list[str]:
    return ["-m", "es_cookbook", "play", f"log_path={log_path}", "trust=tests", *options]


def fed(log_path: Path, stdin: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has imported everything already."""
    done = typed("play", f"log_path={log_path}", "trust=tests", *options, stdin=stdin)
    done.stderr = after_start(done.stderr)
    return done


def expected(log_path: Path, asked: Sequence[tuple[int, int | str, str]]) -> list[str]:
    """What (generation, who) answers to a prompt, asked of an engine directly."""

    async def ask() -> list[str]:
        rebuilt = await rebuild(open_run(log_path, trust=["tests"]))
        texts: list[str] = []
        for generation, who, prompt in asked:
            await rebuilt.go_to(generation)
            tokens_T = tuple(rebuilt.engine.tokenizer.encode(prompt))
            params = SamplingParams(max_tokens=4, temperature=1.0)
            seed = derive_seed(0, "play")
            action = await rebuilt.answer(who, Observation(tokens_T), params, seed)
            texts.append(action.text)
        await rebuilt.close()
        return texts

    return anyio.run(ask)


@pytest.mark.slow
def test_through_a_pipe_each_answer_is_one_line(log_path: Path, programs: Programs) -> None:
    keys = "A\n/base\nA\n/generation 2\nA\n/genome 1\nA\n/generation\nA\n/quit\nnever\n"
    done = programs.run(*command(log_path), cwd=ROOT, stdin=keys)
    assert (done.returncode, after_start(done.stderr)) == (0, "")
    asked = [(4, "centre"), (0, "base"), (2, "centre"), (2, 1), (4, "centre")]
    answers = expected(log_path, [(generation, who, "A") for generation, who in asked])
    assert done.stdout == "".join(f"{one_line(answer)}\n" for answer in answers)
    assert len(set(answers)) > 2, "there was something to mistake"


@pytest.mark.slow
def test_options_say_who_answers_and_how(log_path: Path) -> None:
    done = fed(log_path, "A\n", "generation=2", "genome=1")
    assert done.stdout.splitlines() == expected(log_path, [(2, 1, "A")]), done.stderr
    how = ("max_tokens=20", "temperature=2")
    first, second, third = (
        fed(log_path, "A\n", *how, more).stdout for more in ("seed=4", "seed=5", "seed=5")
    )
    assert first != second == third


def test_prompts_go_through_the_chat_template_unless_told_not_to(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }} = B: {% endfor %}"
    )
    run(tmp_path)
    plain, chat = expected(tmp_path / "run", [(4, "centre", "A"), (4, "centre", "A = B: ")])
    assert plain != chat
    assert fed(tmp_path / "run", "A\n").stdout == f"{one_line(chat)}\n"
    assert fed(tmp_path / "run", "A\n", "chat=false").stdout == f"{one_line(plain)}\n"


def test_typed_prompts_use_the_stop_strings_of_the_run(
    fake_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    async def usual_stop(_: object) -> tuple[str, ...]:
        return ("#",)

    async def answer(
        _: object, __: object, seen: Observation, how: SamplingParams, *_rest: object
    ) -> Action:
        asked.append((seen.usual_stop, how.stop))
        return Action((0,), "x", "stop")

    monkeypatch.setattr(RebuiltRun, "usual_stop", usual_stop)
    monkeypatch.setattr(RebuiltRun, "answer", answer)
    assert fed(fake_run, "A\n").stdout == "x\n"
    assert asked == [(("#",), ())], "`stop` of the run is empty"


def test_a_problem_is_a_line_with_what_its_env_said(log_path: Path) -> None:
    kept = json.loads((log_path / "rollouts.jsonl").read_text().splitlines()[5])
    done = fed(
        log_path,
        f"/genome {kept['genome']}\n/problem train {kept['problem']}\n",
        f"generation={kept['generation']}",
    )
    (played,) = done.stdout.splitlines()
    number = 2 * kept["generation"] + kept["problem"]
    assert played.startswith(rf"train problem {kept['problem']} (train {number})\nprompt:\n  ")
    assert one_line(kept["turns"][0]["action"]) in played
    assert f"reward {kept['reward']:g}" in played
    once = fed(log_path, "never read\n", "problem=1", "genome=base")
    assert once.stdout.startswith("test problem 1 (test 51)")


def test_a_line_that_ends_in_a_backslash_goes_on(fake_run: Path) -> None:
    keys = "/help\na\\\nb\\\\\n//help\n\nlast\\\n"
    engine = "engine=tests.play_engines:EchoBuilder"
    done = fed(fake_run, keys, engine)
    *listed, first, second = done.stdout.splitlines()
    assert listed[0].startswith("/genome G") and "//" in listed[-1]
    assert (first, second) == (r"a\nb\\", "/help")
    assert done.stderr == "line 5: a prompt needs at least one token, found none\n"
    assert fed(fake_run, "last\\\n", engine).stdout == "last\\n\n"


def test_a_mistake_in_a_pipe_stops_it_and_names_the_line(fake_run: Path) -> None:
    done = fed(fake_run, "fine\n/genom 3\nnever\n")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert done.stderr.startswith("line 2: there is no command /genom; did you mean 'genome'? ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["generation=5"],
            "there is no generation 5: the run has recorded 4 of 4, so 0 (the base)",
        ),
        (["generation=1", "genome=4"], "there is no genome 4: generation 1 has 4, 0 to 3"),
        (["genome=0", "generation=4"], "generation 4 has no genomes: it is the end of the run; "),
        (["problem=4"], "there is no held-out problem 4: the run has 4, 0 to 3"),
        (["temperature=-1"], "temperature must be 0 or more, found -1"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(
    fake_run: Path, options: list[str], sentence: str
) -> None:
    done = fed(fake_run, "never read", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(sentence) and done.stderr.count("\n") == 1


class Person:
    """Somebody at a real terminal."""

    def __init__(self, programs: Programs, arguments: Sequence[str]) -> None:
        self._programs = programs
        self._terminal, its_end = pty.openpty()
        # Otherwise `readline` sends escape sequences.
        programs.start(arguments, [os.ttyname(its_end)] * 3, environment={"TERM": "dumb"})
        os.close(its_end)
        self.seen = ""

    def sees(self, end: str) -> str:
        """Wait until the screen ends with this, or closes; gives what came since the last time."""
        said = ""
        deadline = time.monotonic() + 60
        while not (end and said.endswith(end)):
            assert time.monotonic() < deadline, said
            if select.select([self._terminal], [], [], 0.1)[0]:
                try:
                    said += os.read(self._terminal, 65536).decode(errors="replace")
                except OSError:  # The other end is closed.
                    assert not end, said
                    break
        self.seen += said
        return said.replace("\r\n", "\n")

    def types(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def leaves(self) -> int:
        code = self._programs.exit_code()
        os.close(self._terminal)
        return code


@pytest.mark.slow
def test_a_dialogue_in_a_terminal(log_path: Path, programs: Programs) -> None:
    person = Person(programs, command(log_path))
    hint = person.sees("generation 4, centre> ")
    assert "4 of 4 generations are recorded. A line is a prompt; /help lists commands." in hint
    assert "For other programs: " in hint and " serve log_path=" in hint
    person.types("A\n")
    (answer,) = expected(log_path, [(4, "centre", "A")])
    said = person.sees("generation 4, centre> ")
    assert said == f"A\n{answer}\n[cut after 4 tokens]\ngeneration 4, centre> "
    person.types("\n/generation 3\n")
    person.sees("generation 3, centre> ")
    person.types("/genome 9\n")
    assert "there is no genome 9: generation 3 has 4, 0 to 3" in person.sees("centre> ")
    person.types("/genome 2\n")
    person.sees("generation 3, genome 2> ")
    person.types("/problem 1\n")
    shown = person.sees("generation 3, genome 2> ")
    assert "test problem 1 (test 51)\nprompt:\n  " in shown
    assert "\nanswer (4 tokens, cut):\n  " in shown
    assert "\nreward " in shown and "  correct " in shown and "  format 1" in shown
    person.types("/help\n")
    listed = person.sees("genome 2> ")
    names = "genome centre base generation problem help quit"
    assert all(f"/{name}" in listed for name in names.split())
    person.types("/quit\n")
    person.sees("")
    assert person.leaves() == 0


@pytest.mark.slow
def test_control_characters_of_answers_are_escaped(fake_run: Path, programs: Programs) -> None:
    person = Person(programs, command(fake_run, "engine=tests.play_engines:HostileBuilder"))
    person.sees("centre> ")
    for keys in ("hello\n", "/problem 0\n", "/problem train 1\n"):
        person.types(keys)
        said = person.sees("centre> ")
        assert r"\x1b[2J\x1b]0;title\x07\x9b1A \u202egnp.exe\u2028\r\x7f\ud800 end" in said
        assert "two\n" in said and "lines \\ " in said
    person.types("\x04")
    person.sees("")
    assert person.leaves() == 0
    assert (
        set(map(unicodedata.category, person.seen.replace("\r\n", ""))) & {"Cc", "Cf", "Zl"}
        == set()
    )


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_then_the_program(fake_run: Path, programs: Programs) -> None:
    person = Person(programs, command(fake_run, "engine=tests.play_engines:SilentBuilder"))
    person.sees("centre> ")
    person.types("hello\n")
    person.sees("hello\r\n")
    time.sleep(0.3)  # Nothing shows that it is being answered.
    person.types("\x03")
    assert "[stopped]" in person.sees("centre> ")
    person.types("/base\n")
    person.sees("base> ")
    person.types("hello\n")
    assert person.sees("base> ").split("\n")[1].isdigit(), "it goes on"
    time.sleep(1)  # `readline` misses one that comes between the prompt and its first look.
    person.types("\x03")
    person.sees("")
    assert person.leaves() == 0
