"""Where answers are shown: to a person at a terminal, or to a script through a pipe.

What a model, an Env or a dataset wrote is shown as text and never obeyed (`runs.plain_text`).
"""

import contextlib
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from typing import TypeAlias

from typing_extensions import override

from es_cookbook.common.errors import ESCookbookError
from es_cookbook.rl.types import Action, LostRollout
from es_cookbook.runs.plain_text import one_line, printable
from es_cookbook.train.recorded import Played

Decode: TypeAlias = Callable[[Sequence[int]], str]


class Console(ABC):
    """Reads prompts and shows what comes of them."""

    skips_empty = False
    """Whether an empty line is no prompt."""

    def __init__(self) -> None:
        # Bytes that are no text in this encoding, and characters that it lacks, are no reason to
        # stop.
        for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors=errors)

    def read(self, prompt: str) -> str | None:
        """The next prompt, or None at the end. A line that ends in a backslash goes on."""
        text, prefix = "", prompt
        while (line := self._read_line(prefix)) is not None:
            # Two backslashes at the end of a line are two backslashes, as LaTeX has them.
            if (len(line) - len(line.rstrip("\\"))) % 2 == 0:
                return text + line
            text += line[:-1] + "\n"
            prefix = "... "
        return text or None

    @abstractmethod
    def _read_line(self, prefix: str) -> str | None:
        """A line without its newline, or None at the end."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Tell a person something that is no answer."""

    @abstractmethod
    def show_answer(self, action: Action) -> None:
        """Show what a prompt got."""

    @abstractmethod
    def show_problem(self, played: Played, decode: Decode, which: Mapping[str, object]) -> None:
        """Show an attempt at a problem.

        Args:
            played: the attempt.
            decode: tokens to text.
            which: generation, genome, split and number.
        """

    @abstractmethod
    def show_mistake(self, error: ESCookbookError) -> None:
        """Tell what could not be done."""

    @abstractmethod
    def interrupted(self) -> None:
        """An answer was stopped by Ctrl-C."""


class Terminal(Console):
    """A person."""

    skips_empty = True

    def __init__(self) -> None:
        super().__init__()
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # Gives `input` arrow keys and a memory.

    def _read_line(self, prefix: str) -> str | None:
        try:
            return input(prefix)
        except (EOFError, KeyboardInterrupt):
            print()
            return None

    @override
    def say(self, text: str) -> None:
        print(printable(text), flush=True)

    @override
    def show_answer(self, action: Action) -> None:
        print(printable(action.text))
        if action.stop_reason == "length":
            print(f"[cut after {len(action.tokens_T)} tokens]")

    @override
    def show_problem(self, played: Played, decode: Decode, which: Mapping[str, object]) -> None:
        name = f" ({played.problem})" if played.problem else ""
        lines = [f"{which['split']} problem {which['problem']}{name}"]
        if isinstance(played.rollout, LostRollout):
            lines.append(f"lost: {played.rollout.reason}")
        else:
            for turn in played.rollout.transitions:
                cut = ", cut" if turn.action.stop_reason == "length" else ""
                lines += ["prompt:", _indented(decode(turn.observation.tokens_T))]
                lines += [f"answer ({len(turn.action.tokens_T)} tokens{cut}):"]
                lines += [_indented(turn.action.text)]
                lines += [f"{name}: {text}" for name, text in turn.logs.items()]
                metrics = {"reward": turn.reward, **turn.metrics}
                lines.append("  ".join(f"{name} {value:g}" for name, value in metrics.items()))
            if len(played.rollout.transitions) > 1:
                lines.append(f"reward of all turns {played.reward:g}")
        if played.without_group_reward:
            lines.append("without the reward that compares genomes: nobody else attempted it")
        self.say("\n".join(lines))

    @override
    def show_mistake(self, error: ESCookbookError) -> None:
        self.say(str(error))

    @override
    def interrupted(self) -> None:
        print("\n[stopped]")


class Pipe(Console):
    """A script: a line for each answer, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._num_lines = 0

    def _read_line(self, prefix: str) -> str | None:
        line = sys.stdin.readline()
        self._num_lines += 1
        return line.removesuffix("\n") if line else None

    @override
    def say(self, text: str) -> None:
        """Nothing: it is no answer."""

    @override
    def show_answer(self, action: Action) -> None:
        print(one_line(action.text), flush=True)

    @override
    def show_problem(self, played: Played, decode: Decode, which: Mapping[str, object]) -> None:
        what = {**which, "name": played.problem, "reward": played.reward}
        if isinstance(played.rollout, LostRollout):
            what |= {"lost": played.rollout.reason, "reward": None}
        else:
            what["turns"] = [
                {
                    "prompt": decode(turn.observation.tokens_T),
                    "action": turn.action.text,
                    "stop_reason": turn.action.stop_reason,
                    "reward": turn.reward,
                    "metrics": dict(turn.metrics),
                    "logs": dict(turn.logs),
                }
                for turn in played.rollout.transitions
            ]
        # In ASCII JSON escapes all that could be a command, except for DEL.
        print(json.dumps(what).replace("\x7f", r"\u007f"), flush=True)

    @override
    def show_mistake(self, error: ESCookbookError) -> None:
        """Stop: whoever counts lines would take the next answer for this one's."""
        raise type(error)(f"line {self._num_lines}: {error}") from error

    @override
    def interrupted(self) -> None:
        raise KeyboardInterrupt


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.removesuffix("\n").split("\n"))
