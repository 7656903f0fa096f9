"""Talk to a run: its centre, its base, or any genome of any generation, rebuilt from seeds.

    python -m es_cookbook play runs/mine
    python -m es_cookbook play runs/mine generation=12 genome=3
    python -m es_cookbook play runs/mine problem=7
    echo 'What is 2 + 2?' | python -m es_cookbook play runs/mine genome=base

In a terminal a line is a prompt, or a command (`/help` lists them). Through a pipe it is the same
without decoration: a line for each answer, with newlines and control characters written as in a
Python string, and for `/problem` a line of JSON with the keys of `rollouts.jsonl`.
A line that ends in a backslash goes on in the next, so a prompt may hold newlines. Every prompt
stands alone: there is no conversation.

The run directory is only read; the run may be going on.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from io import TextIOWrapper
from pathlib import Path
from typing import TypeAlias, TypeVar

import chz
from anyio.from_thread import BlockingPortal, start_blocking_portal

from es_cookbook.commands.options import Answering, RecordedAt
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import (
    ConfigError,
    DataError,
    ESCookbookError,
    RequestError,
    nearest,
)
from es_cookbook.common.seeds import derive_seed
from es_cookbook.common.terminal import plural, printable, say
from es_cookbook.engines.base import Target
from es_cookbook.rl.problem_env import render_prompt
from es_cookbook.rl.types import Action, LostRollout, Observation
from es_cookbook.train.recorded import Played, RebuiltRun, RecordedRun, Split, rebuild

Decode: TypeAlias = Callable[[Sequence[int]], str]
_USERS_MISTAKES = (ConfigError, DataError, RequestError)
"""After these the next prompt may well be answered."""

_Result = TypeVar("_Result")


@chz.chz
class PlayConfig(RecordedAt, Answering):
    """Answer prompts with the centre, the base or any genome of a run; /help lists commands."""

    chat: bool = chz.field(
        default=True, doc="put prompts into the tokenizer's chat template, if it has one"
    )
    temperature: float | None = chz.field(
        default=None, doc="0 is greedy; the run's own if None, and greedy for held-out problems"
    )
    max_tokens: int | None = chz.field(
        default=None, doc="most tokens of an answer; the run's own if None"
    )
    seed: int | None = chz.field(
        default=None, doc="of the sampling; for problems the run's own if None, for prompts 0"
    )
    problem: int | None = chz.field(
        default=None, doc="play this problem of the run by its Env and end, without prompts"
    )
    split: Split = chz.field(
        default="test", doc="test: the held-out problems; train: the generation's batch"
    )


class Terminal:
    """A person."""

    skips_empty = True
    """Whether an empty line is no prompt."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # Gives `input` arrow keys and a memory.

    def read_line(self, prefix: str) -> str | None:
        """A line without its newline, or None at the end."""
        try:
            return input(prefix)
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    def say(self, text: str) -> None:
        """Tell something that is no answer."""
        print(printable(text), flush=True)

    show_help = say
    """Show the list of commands."""

    def show_answer(self, action: Action) -> None:
        print(printable(action.text))
        if action.stop_reason == "length":
            print(f"[cut after {plural(len(action.tokens_T), 'token')}]")

    def show_problem(self, played: Played, decode: Decode, which: Mapping[str, object]) -> None:
        """Show an attempt at a problem; `which` has its generation, genome, split and number."""
        name = f" ({played.problem})" if played.problem else ""
        lines = [f"{which['split']} problem {which['problem']}{name}"]
        rollout = played.rollout
        if isinstance(rollout, LostRollout):
            lines.append(f"lost: {rollout.reason}")
        else:
            for turn, (kind, new_T) in zip(rollout.transitions, rollout.seen, strict=True):
                cut = ", cut" if turn.action.stop_reason == "length" else ""
                lines += [f"{kind}:", _indented(decode(new_T))]
                lines += [f"answer ({plural(len(turn.action.tokens_T), 'token')}{cut}):"]
                lines += [_indented(turn.action.text)]
                lines += [f"{name}: {text}" for name, text in turn.logs.items()]
                metrics = {"reward": turn.reward, **turn.metrics}
                lines.append("  ".join(f"{name} {value:g}" for name, value in metrics.items()))
            if len(rollout.transitions) > 1:
                lines.append(f"reward of all turns {played.reward:g}")
        if played.without_group_reward:
            lines.append("without the reward that compares genomes: nobody else attempted it")
        self.say("\n".join(lines))

    def show_mistake(self, error: ESCookbookError) -> None:
        self.say(str(error))

    def interrupted(self) -> None:
        print("\n[stopped]")


class Pipe:
    """A script: a line for each answer, and nothing else."""

    skips_empty = False

    def __init__(self) -> None:
        self._num_lines = 0

    def read_line(self, prefix: str) -> str | None:
        """A line without its newline, or None at the end."""
        line = sys.stdin.readline()
        self._num_lines += 1
        return line.removesuffix("\n") if line else None

    def say(self, text: str) -> None:
        """Nothing: it is no answer."""

    def show_help(self, text: str) -> None:
        print(text, flush=True)

    def show_answer(self, action: Action) -> None:
        print(printable(action.text).replace("\n", r"\n"), flush=True)

    def show_problem(self, played: Played, decode: Decode, which: Mapping[str, object]) -> None:
        what = {**which, "name": played.problem, "reward": played.reward}
        rollout = played.rollout
        if isinstance(rollout, LostRollout):
            what |= {"lost": rollout.reason, "reward": None}
        else:
            what["turns"] = [
                {
                    kind: decode(new_T),
                    "action": turn.action.text,
                    "stop_reason": turn.action.stop_reason,
                    "reward": turn.reward,
                    "metrics": dict(turn.metrics),
                    "logs": dict(turn.logs),
                }
                for turn, (kind, new_T) in zip(rollout.transitions, rollout.seen, strict=True)
            ]
        # In ASCII JSON escapes all that could be a command, except for DEL.
        print(json.dumps(what).replace("\x7f", r"\u007f"), flush=True)

    def show_mistake(self, error: ESCookbookError) -> None:
        """Stop: whoever counts lines would take the next answer for this one's."""
        raise type(error)(f"line {self._num_lines}: {error}") from error

    def interrupted(self) -> None:
        raise KeyboardInterrupt


Console: TypeAlias = Terminal | Pipe
"""Reads lines and shows what comes of them."""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.removesuffix("\n").split("\n"))


def open_console() -> Console:
    """A person's, or a script's."""
    # Bytes that are no text in this encoding, and characters that it lacks, are no reason to stop.
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Pipe()


def read(console: Console, prompt: str) -> str | None:
    """The next prompt, or None at the end. A line that ends in a backslash goes on."""
    text, prefix = "", prompt
    while (line := console.read_line(prefix)) is not None:
        # Two backslashes at the end of a line are two backslashes, as LaTeX has them.
        if (len(line) - len(line.rstrip("\\"))) % 2 == 0:
            return text + line
        text += line[:-1] + "\n"
        prefix = "... "
    return text or None


class Session:
    """What is set now, and what the commands do.

    The engine's event loop is behind `portal`, in another thread: this one reads.
    """

    def __init__(
        self, config: PlayConfig, rebuilt: RebuiltRun, portal: BlockingPortal, console: Console
    ) -> None:
        self._rebuilt = rebuilt
        self._portal = portal
        self._console = console
        self._chat = config.chat
        self._split: Split = config.split
        self._who: Target = "centre"
        self._seed = config.seed
        self._overrides: dict[str, object] = {}
        self._override("temperature", config.temperature)
        self._override("max_tokens", config.max_tokens)
        # What a command takes, what it does, and how.
        self._commands: dict[str, tuple[str, str, Callable[[Sequence[str]], None]]] = {
            "genome": ("G", "answer as genome G of this generation", self._to_genome),
            "centre": ("", "answer as the centre", lambda _: self.answer_as("centre")),
            "base": ("", "answer as the base model", lambda _: self.answer_as("base")),
            "generation": ("[T]", "go to the centre after T generations; the latest", self._to),
            "problem": ("[train|test] I", "play problem I of the run by its Env", self._problem),
            "temperature": (
                *("X", "sample at temperature X; 0 is greedy"),
                self._setter("temperature", float),
            ),
            "max_tokens": ("N", "sample N tokens at most", self._setter("max_tokens", int)),
            "seed": ("N", "seed of the sampling", self._set_seed),
            "help": ("", "this list", self._help),
            "quit": ("", "end; so does the end of the input", self._quit),
        }
        self._over = False

    @property
    def prompt(self) -> str:
        """Who answers next, for a terminal."""
        who = f"genome {self._who}" if isinstance(self._who, int) else self._who
        return f"generation {self._rebuilt.generation}, {who}> "

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
        which = {"generation": rebuilt.generation, "genome": who, "split": split, "problem": number}
        self._console.show_problem(played, lambda tokens_T: str(decode(list(tokens_T))), which)

    def run(self) -> None:
        """Answer until the input ends."""
        while not self._over and (text := read(self._console, self.prompt)) is not None:
            try:
                self._take(text)
            except _USERS_MISTAKES as error:
                self._console.show_mistake(error)
            except KeyboardInterrupt:
                self._console.interrupted()

    def _take(self, text: str) -> None:
        if text.startswith("/") and not text.startswith("//"):
            name, *arguments = text[1:].split() or [""]
            if name not in self._commands:
                raise ConfigError(
                    f"there is no command /{name}; {nearest(name, self._commands)} (a prompt that "
                    "begins with / is written with //)"
                )
            takes, _, act = self._commands[name]
            if len(arguments) != len(takes.split()) and not takes.startswith("["):
                raise ConfigError(f"/{name} takes {takes or 'nothing'}, found {text!r}")
            act(arguments)
        elif text or not self._console.skips_empty:
            self._answer(text.removeprefix("/") if text.startswith("//") else text)

    def _answer(self, text: str) -> None:
        rebuilt = self._rebuilt
        tokens_T = render_prompt(rebuilt.engine.tokenizer, text, chat=self._chat)
        params = chz.replace(rebuilt.run.config.sampling, **self._overrides)
        seed = derive_seed(self._seed or 0, "play")
        action = self._call(lambda: rebuilt.answer(self._who, Observation(tokens_T), params, seed))
        self._console.show_answer(action)

    def _to_genome(self, arguments: Sequence[str]) -> None:
        number, run = _whole("genome", arguments[0]), self._rebuilt.run
        if (end := self._rebuilt.generation) > run.last_with_genomes:
            run.genome(run.last_with_genomes, number)
            self.go_to(run.last_with_genomes)
            self._console.say(
                f"generation {end} is the end of the run and has no genomes: this is generation "
                f"{run.last_with_genomes}"
            )
        self.answer_as(number)

    def _to(self, arguments: Sequence[str]) -> None:
        if len(arguments) > 1:
            raise ConfigError(f"/generation takes one number or none, found {len(arguments)}")
        self.go_to(_whole("generation", arguments[0]) if arguments else None)

    def _problem(self, arguments: Sequence[str]) -> None:
        *splits, number = arguments or [""]
        if len(splits) > 1 or any(split not in ("test", "train") for split in splits):
            raise ConfigError(f"/problem takes [train|test] I, found {' '.join(arguments)!r}")
        split: Split = self._split if not splits else "train" if splits[0] == "train" else "test"
        self.play(split, _whole("problem", number))

    def _setter(self, name: str, kind: type[float]) -> Callable[[Sequence[str]], None]:
        return lambda arguments: self._override(name, _number(name, arguments[0], kind))

    def _set_seed(self, arguments: Sequence[str]) -> None:
        self._seed = _whole("seed", arguments[0])

    def _help(self, _: Sequence[str]) -> None:
        lines = [
            f"/{name} {takes}".ljust(26) + what for name, (takes, what, _) in self._commands.items()
        ]
        lines.append(
            "Anything else is a prompt, and stands alone. A line that ends in \\ goes on in the "
            "next; // begins a prompt with /."
        )
        self._console.show_help("\n".join(lines))

    def _quit(self, _: Sequence[str]) -> None:
        self._over = True

    def _override(self, name: str, value: float | None) -> None:
        """Set a sampling parameter, if it can be; None leaves it."""
        if value is not None:
            chz.replace(self._rebuilt.run.config.sampling, **{name: value})
            self._overrides[name] = value

    def _call(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run it on the engine's event loop; a Ctrl-C cancels it."""
        future = self._portal.start_task_soon(function)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            with contextlib.suppress(CancelledError):
                future.result()
            raise


def _number(what: str, text: str, kind: type[float] = int) -> float:
    try:
        return kind(text)
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"/{what} takes {wanted}, found {text!r}") from error


def _whole(what: str, text: str) -> int:
    return int(_number(what, text))


def main(config: PlayConfig) -> None:
    run = RecordedRun(Path(config.log_path), config.model_name, config.trust)
    generation = run.resolved(config.generation, config.genome)
    engine = config.engine or run.config.engine
    say(f"{config.log_path}: loading {run.model_name} on {engine.name}")
    console = open_console()
    with contextlib.ExitStack() as stack:
        # The engine has an event loop and a thread of its own: this one waits for a person.
        portal = stack.enter_context(start_blocking_portal())
        rebuilt = portal.call(rebuild, run, engine)
        stack.callback(portal.call, rebuilt.close)
        session = Session(config, rebuilt, portal, console)
        session.go_to(generation)
        session.answer_as(config.genome)
        if config.problem is not None:
            session.play(config.split, config.problem)
            return
        console.say(
            f"{len(run.records)} of {run.config.num_generations} generations are recorded. "
            "A line is a prompt; /help lists commands."
        )
        session.run()


def cli() -> None:
    run_cli(main, PlayConfig)
