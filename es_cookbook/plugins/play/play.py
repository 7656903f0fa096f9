"""Talk to a run: its centre, its base, or any genome of any generation, rebuilt from seeds.

    python -m es_cookbook play runs/mine
    python -m es_cookbook play runs/mine generation=12 genome=3
    python -m es_cookbook play runs/mine problem=7
    echo 'What is 2 + 2?' | python -m es_cookbook play runs/mine genome=base

In a terminal, a line is a prompt or a command (`/help` lists them). Through a pipe, each answer or
problem is one line, with newlines and control characters escaped as in a Python string. A line that
ends in a backslash continues on the next, so a prompt may contain newlines. Prompts are
independent: there is no conversation.

The run directory is only read; the run may be in progress.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from io import TextIOWrapper
from pathlib import Path
from typing import TypeAlias, TypeVar

import chz
from anyio.from_thread import BlockingPortal, start_blocking_portal

from es_cookbook.cli.options import Answering, RecordedAt
from es_cookbook.common.checks import in_range
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError, RequestError, nearest
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import command, plural, printable, say
from es_cookbook.engines.base import Target
from es_cookbook.rl.prompts import render_prompt
from es_cookbook.rl.types import LostRollout, Observation
from es_cookbook.runs.recorded import Played, RebuiltRun, Split, open_run, rebuild

Decode: TypeAlias = Callable[[Sequence[int]], str]
_Result = TypeVar("_Result")


@chz.chz
class PlayConfig(RecordedAt, Answering):
    """Answer prompts with the centre, the base or any genome of a run; /help lists commands."""

    chat: bool = chz.field(default=True, doc="apply the tokenizer's chat template, if it has one")
    temperature: float | None = chz.field(
        default=None,
        doc="0 is greedy; None: the run's own, and its eval_temperature for held-out problems",
    )
    max_tokens: int | None = chz.field(default=None, doc="tokens per answer; None: the run's own")
    seed: int | None = chz.field(
        default=None, doc="sampling seed; None: the run's own for problems, 0 for prompts"
    )
    problem: int | None = chz.field(default=None, doc="play this problem of the run, then exit")
    split: Split = chz.field(default="test", doc="test: held out; train: the generation's batch")

    _max_tokens = in_range("max_tokens", at_least=1)
    _not_negative = in_range("temperature", "seed", "problem", at_least=0)


COMMANDS = {
    "genome": ("G", "answer as genome G of this generation"),
    "centre": ("", "answer as the centre"),
    "base": ("", "answer as the base model"),
    "generation": ("[T]", "go to the centre after T generations, or to the latest"),
    "problem": ("[train|test] I", "play problem I of the run through its Env"),
    "help": ("", "show this list"),
    "quit": ("", "exit; so does the end of the input"),
}
"""Command -> its arguments and description."""
_HELP = "\n".join(
    [
        *(f"/{name} {takes}".ljust(26) + what for name, (takes, what) in COMMANDS.items()),
        "Anything else is a prompt. A line that ends in \\ continues on the next; "
        "// begins a prompt with /.",
    ]
)


def is_at_terminal() -> bool:
    """Return whether a person is at the terminal, rather than a script."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def problem_text(played: Played, decode: Decode, title: str) -> str:
    """Return an attempt at a problem as text under a title."""
    name = f" ({played.problem})" if played.problem else ""
    lines = [f"{title}{name}"]
    rollout = played.rollout
    if isinstance(rollout, LostRollout):
        lines.append(f"lost: {rollout.reason}")
    else:
        for turn, (kind, new_T) in zip(rollout.transitions, rollout.seen, strict=True):
            cut = ", cut" if turn.action.stop_reason == "length" else ""
            answer = f"answer ({plural(len(turn.action.tokens_T), 'token')}{cut}):"
            for head, text in ((f"{kind}:", decode(new_T)), (answer, turn.action.text)):
                lines += [head, *(f"  {line}" for line in text.removesuffix("\n").split("\n"))]
            lines += [f"{name}: {text}" for name, text in turn.logs.items()]
            metrics = {"reward": turn.reward, **turn.metrics}
            lines.append("  ".join(f"{name} {value:g}" for name, value in metrics.items()))
        if len(rollout.transitions) > 1:
            lines.append(f"reward of all turns {played.reward:g}")
    if played.without_group_reward:
        lines.append("without the reward that compares genomes: no other genome attempted it")
    return printable("\n".join(lines))


class _Session:
    """The state and commands of a dialogue with a person or a script.

    The engine's event loop runs behind `portal`, in another thread; this thread reads the input.
    """

    def __init__(self, config: PlayConfig, rebuilt: RebuiltRun, portal: BlockingPortal) -> None:
        self._rebuilt, self._portal = rebuilt, portal
        self.person = is_at_terminal()
        if self.person:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # Gives `input` arrow keys and a history.
        # Invalid bytes, and characters that the encoding lacks, are replaced.
        for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors=errors)
        self._chat, self._seed = config.chat, config.seed
        self._who: Target = "centre"
        given = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        self._overrides = {name: value for name, value in given.items() if value is not None}
        self._sampling = chz.replace(rebuilt.run.config.sampling, **self._overrides)
        self._num_lines = 0
        self._over = False

    def go_to(self, generation: int | None) -> None:
        """Go to a generation's centre; to the latest one if None."""
        run = self._rebuilt.run
        run.refresh()
        self._call(
            lambda: self._rebuilt.go_to(len(run.records) if generation is None else generation)
        )
        self._who = "centre"

    def answer_as(self, who: Target) -> None:
        if isinstance(who, int):
            self._rebuilt.run.genome(self._rebuilt.generation, who)
        self._who = who

    def play(self, split: Split, number: int) -> None:
        rebuilt, who = self._rebuilt, self._who
        played = self._call(lambda: rebuilt.play(who, split, number, self._overrides, self._seed))
        decode = rebuilt.engine.tokenizer.decode
        title = f"{split} problem {number}"
        self._show(problem_text(played, lambda tokens_T: str(decode(list(tokens_T))), title))

    def run(self, split: Split) -> None:
        """Answer until the input ends; `split` is the default of /problem."""
        while not self._over and (text := self._read()) is not None:
            try:
                self._handle(text, split)
            except (ConfigError, DataError, RequestError) as error:
                if not self.person:  # A script would take the next answer for this one.
                    raise type(error)(f"line {self._num_lines}: {error}") from error
                print(printable(str(error)), flush=True)
            except KeyboardInterrupt:
                if not self.person:
                    raise
                print("\n[stopped]")

    def _read(self) -> str | None:
        """Read the next prompt; None at the end. A trailing backslash continues a line."""
        who = f"genome {self._who}" if isinstance(self._who, int) else self._who
        text, prefix = "", f"generation {self._rebuilt.generation}, {who}> "
        while (line := self._read_line(prefix)) is not None:
            # An even number of backslashes is text, as in LaTeX.
            if (len(line) - len(line.rstrip("\\"))) % 2 == 0:
                return text + line
            text += line[:-1] + "\n"
            prefix = "... "
        return text or None

    def _read_line(self, prefix: str) -> str | None:
        self._num_lines += 1
        if not self.person:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            return input(prefix)
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def _handle(self, text: str, split: Split) -> None:
        if text.startswith("/") and not text.startswith("//"):
            name, *arguments = text[1:].split() or [""]
            if name not in COMMANDS:
                raise ConfigError(
                    f"there is no command /{name}; {nearest(name, COMMANDS)} (a prompt that "
                    "begins with / is written with //)"
                )
            if not self._run_command(name, arguments, split):
                takes = COMMANDS[name][0] or "nothing"
                raise ConfigError(f"/{name} takes {takes}, found {text!r}")
        elif text or not self.person:
            self._answer(text.removeprefix("/") if text.startswith("//") else text)

    def _run_command(self, name: str, arguments: Sequence[str], split: Split) -> bool:
        """Run a command; returns whether it takes such arguments."""
        match name, arguments:
            case "genome", [number]:
                self.answer_as(_whole(name, number))
            case ("centre" | "base") as who, []:
                self.answer_as(who)
            case "generation", []:
                self.go_to(None)
            case "generation", [number]:
                self.go_to(_whole(name, number))
            case "problem", [number]:
                self.play(split, _whole(name, number))
            case "problem", [("train" | "test") as other, number]:
                self.play(other, _whole(name, number))
            case "help", []:
                print(_HELP, flush=True)
            case "quit", []:
                self._over = True
            case _:
                return False
        return True

    def _answer(self, text: str) -> None:
        rebuilt = self._rebuilt
        tokens_T = render_prompt(rebuilt.engine.tokenizer, text, chat=self._chat)
        seed = derive_seed(self._seed or 0, "play")
        observation = Observation(tokens_T, usual_stop=self._usual_stop)
        action = self._call(lambda: rebuilt.answer(self._who, observation, self._sampling, seed))
        self._show(printable(action.text))
        if self.person and action.stop_reason == "length":
            print(f"[cut after {plural(len(action.tokens_T), 'token')}]")

    def _show(self, text: str) -> None:
        print(text if self.person else text.replace("\n", r"\n"), flush=True)

    @functools.cached_property
    def _usual_stop(self) -> tuple[str, ...]:
        """The stop texts of the run, for plain prompts."""
        if self._chat and self._rebuilt.engine.tokenizer.chat_template is not None:
            return ()
        return self._call(self._rebuilt.usual_stop)

    def _call(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a coroutine on the engine's event loop; Ctrl-C cancels it."""
        future = self._portal.start_task_soon(function)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(CancelledError):
                future.result()
            raise


def _whole(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"/{what} takes a whole number, found {text!r}") from error


def main(config: PlayConfig) -> None:
    run = open_run(Path(config.log_path), config.model_name, config.trust)
    generation = run.resolved(config.generation, config.genome)
    engine = config.engine or run.config.engine
    say(f"{config.log_path}: loading {run.model_name} on {engine.name}")
    with contextlib.ExitStack() as stack:
        # The engine has its own event loop and thread, since this one waits for input.
        portal = stack.enter_context(start_blocking_portal())
        rebuilt = portal.call(rebuild, run, engine)
        stack.callback(portal.call, rebuilt.close)
        session = _Session(config, rebuilt, portal)
        session.go_to(generation)
        session.answer_as(config.genome)
        if config.problem is not None:
            session.play(config.split, config.problem)
            return
        if session.person:
            print(
                f"{len(run.records)} of {run.config.num_generations} generations are recorded. "
                "A line is a prompt; /help lists commands. "
                f"For other programs: {command('serve', log_path=config.log_path)}",
                flush=True,
            )
        session.run(config.split)


def cli() -> None:
    run_cli(main, PlayConfig)
