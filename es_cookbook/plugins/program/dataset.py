"""Rows that a program works on, with the model behind OpenAI's API.

    es-cookbook train program="node agent.mjs" data=rows.jsonl reward=number
        model_name=Qwen/Qwen2.5-0.5B-Instruct

A rollout runs the program on a row. It finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its
environment, and the row as JSON on standard input and in the file `ES_COOKBOOK_ROW`. It calls the
model as often as it likes and ends with a result (`es_cookbook.plugins.program.results`), on
standard output or in the file `ES_COOKBOOK_RESULT`. With `rows_at_once` it lives on and takes rows
line by line (`es_cookbook.plugins.program.workers`).

A program runs with your rights, or in a sandbox (`es_cookbook.plugins.program.enclosed`). Time
limits are those of every Env: `rollout_timeout` for all that it does itself, `turn_timeout` for its
silence between two requests.
"""

import functools
import hashlib
from pathlib import Path
from typing import Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, serving
from es_cookbook.common.fields.reach import needs_trust
from es_cookbook.common.machine.processes import command_of
from es_cookbook.plugins.program.results import Form, check_reward
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.task import REWARDS, RowDatasetBuilder, check_row
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.base import Reward, RewardFunction
from es_cookbook.rl.types import Tokenizer


def _program(rows: "ProgramRows") -> str:
    """The command and its sandbox by a digest: they may hold blanks, which such words may not."""
    whole = "\0".join((rows.program, *rows.sandbox))
    return f"program:{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


@chz.chz
class ProgramRows(RowDatasetBuilder):
    """Rows of data, on each of which a program works."""

    program: str = chz.field(
        doc="command that is an episode, for example 'node agent.mjs'; no shell reads it",
        metadata=needs_trust(_program, "is a program that is run"),
    )
    reward: Reward | RewardFunction | None = chz.field(
        meta_factory=REWARDS,
        default=None,
        doc="scores a result: a shared reward its answer, or my_module:function, which gets "
        "result, messages and row, or text and row; None: the program's own",
    )
    result: Form = chz.field(
        default="json",
        doc="what the program prints: a JSON object on a line, or text, which is the answer",
    )
    sandbox: tuple[str, ...] = chz.field(
        default=(),
        doc="run it in bubblewrap, where it sees these paths, /usr and this Python, and reaches "
        "nothing but the model: sandbox=. for the current directory; empty: it has your rights",
    )
    at_once: int = chz.field(default=64, doc="most programs that run, or rows that workers have")
    rows_at_once: int = chz.field(
        default=0, doc="rows of a worker that lives on; 0: a process for each rollout"
    )
    max_turns: int = chz.field(
        default=32,
        doc="most answers that a rollout may ask for; it then ends without reward",
    )
    key_in: Literal["environment", "line"] = chz.field(
        default="environment",
        doc="where a process for a rollout finds address and key: in variables, as OpenAI's "
        "clients do, or in a line as a worker's, where no other process can read them",
    )

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "at_once", "max_turns", at_least=1)
        check_range(self, "rows_at_once", at_least=0)
        check_reward(self.reward)
        if self.rows_at_once and self.result != "json":
            raise ConfigError("rows_at_once: a worker answers in JSON, so result must be json")

    @override
    def check_fields(self, row: Row) -> None:
        check_row(self.reward, row)

    @override
    def check(self) -> None:
        if isinstance(self.reward, Reward):
            self.reward.check()
        super().check()
        for path in self.sandbox:
            if not Path(path).exists():
                raise ConfigError(f"dataset.sandbox: there is no {path!r} that it could see")
            if Path(path).resolve() == Path("/"):
                raise ConfigError(f"dataset.sandbox={path}: that would be everything; give folders")
        words = command_of(self.program, "dataset.program")
        if self.sandbox:
            with serving("dataset.program"):
                from es_cookbook.plugins.program.enclosed import Command
            Command(words, self._seen).check()

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        self.check_fields(row)
        with serving("dataset.program"):
            from es_cookbook.plugins.program.enclosed import Command
            from es_cookbook.plugins.program.env import Program, ProgramEnv, ProgramProblem
        program = Program(
            Command(command_of(self.program, "dataset.program"), self._seen),
            self.reward,
            self.result,
            self.at_once,
            self.rows_at_once,
            self.max_turns,
            tokenizer,
            self.key_in == "line",
        )
        return ProgramProblem(functools.partial(ProgramEnv, program, row), row.where)

    @property
    def _seen(self) -> tuple[Path, ...]:
        return tuple(Path(path).absolute() for path in self.sandbox)
