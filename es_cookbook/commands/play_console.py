"""Where answers are shown: to a person at a terminal, or to a script through a pipe.

What a model, an Env or a dataset wrote is shown as text and never obeyed (`common.terminal`).
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from typing import TypeAlias

from es_cookbook.common.errors import ESCookbookError
from es_cookbook.common.terminal import plural, printable
from es_cookbook.rl.types import Action, LostRollout
from es_cookbook.train.recorded import Played

Decode: TypeAlias = Callable[[Sequence[int]], str]


def open_console() -> "Console":
    """A person's, or a script's."""
    # Bytes that are no text in this encoding, and characters that it lacks, are no reason to stop.
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Pipe()


def read(console: "Console", prompt: str) -> str | None:
    """The next prompt, or None at the end. A line that ends in a backslash goes on."""
    text, prefix = "", prompt
    while (line := console.read_line(prefix)) is not None:
        # Two backslashes at the end of a line are two backslashes, as LaTeX has them.
        if (len(line) - len(line.rstrip("\\"))) % 2 == 0:
            return text + line
        text += line[:-1] + "\n"
        prefix = "... "
    return text or None


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
        """Show what a prompt got."""
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
        """Tell what could not be done."""
        self.say(str(error))

    def interrupted(self) -> None:
        """Tell that Ctrl-C stopped an answer."""
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
        """What was asked for, in several lines."""
        print(text, flush=True)

    def show_answer(self, action: Action) -> None:
        """A line of text."""
        print(printable(action.text).replace("\n", r"\n"), flush=True)

    def show_problem(self, played: Played, decode: Decode, which: Mapping[str, object]) -> None:
        """A line of JSON."""
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
        """Stop."""
        raise KeyboardInterrupt


Console: TypeAlias = Terminal | Pipe
"""Reads lines and shows what comes of them."""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.removesuffix("\n").split("\n"))
