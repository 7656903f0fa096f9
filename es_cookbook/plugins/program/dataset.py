"""Rows that a program works on, with the model behind OpenAI's API.

    es-cookbook train program="node agent.mjs" data=rows.jsonl reward=number
        model_name=Qwen/Qwen2.5-0.5B-Instruct

A rollout runs the program on a row. The program finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its
environment and the row as JSON on standard input, or everything there (`key_in=line`). It calls the
model as often as it likes and prints a result (`es_cookbook.plugins.program.results`). With
`rows_at_once` it lives on and takes rows line by line (`es_cookbook.plugins.program.workers`).

A program runs with your rights, or in a sandbox (`es_cookbook.plugins.program.command`). Time
limits are those of every Env: `rollout_timeout` for the program's own work, `turn_timeout` for the
time between two requests.
"""

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError, importing
from es_cookbook.common.machine.processes import command_of
from es_cookbook.common.trust import needs_trust
from es_cookbook.rl.data.rows import Row
from es_cookbook.rl.data.task import REWARDS, RowDatasetBuilder, check_row
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.rewards.base import Reward, RewardFunction, check_arity
from es_cookbook.rl.types import Tokenizer

if TYPE_CHECKING:
    from es_cookbook.plugins.program.command import Command


def _program(rows: "ProgramRows") -> str:
    """Return a digest of the command and its sandbox, which may contain spaces."""
    whole = "\0".join((rows.program, *rows.sandbox))
    return f"program:{hashlib.sha256(whole.encode()).hexdigest()[:16]}"


@chz.chz
class ProgramRows(RowDatasetBuilder):
    """Rows of data, each solved by a program."""

    program: str = chz.field(
        doc="command to run for an episode, for example 'node agent.mjs', without a shell",
        metadata=needs_trust(_program, "is a program that is run"),
    )
    reward: Reward | RewardFunction | None = chz.field(
        meta_factory=REWARDS,
        default=None,
        doc="scores the answer of a result, like the reward of a task; None: the program's own",
    )
    sandbox: tuple[str, ...] = chz.field(
        default=(),
        doc="run it in bubblewrap, where it sees these paths, /usr and this Python, and reaches "
        "only the model: sandbox=. for the current directory; empty: it has your rights",
    )
    at_once: int = chz.field(
        default=64, doc="maximum number of running programs, or of rows that workers have"
    )
    rows_at_once: int = chz.field(
        default=0, doc="rows of a worker that lives on; 0: a process per rollout"
    )
    max_turns: int = chz.field(
        default=32,
        doc="maximum number of answers per rollout; asking for more ends it without reward",
    )
    key_in: Literal["environment", "line"] = chz.field(
        default="environment",
        doc="where a process per rollout finds address and key: in variables, as OpenAI's clients "
        "do, or in a line like a worker's, which other processes cannot read",
    )

    @chz.validate
    def _valid(self) -> None:
        check_range(self, "at_once", "max_turns", at_least=1)
        check_range(self, "rows_at_once", at_least=0)
        if self.reward is not None:
            check_arity(self.reward)

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
        self._command.check()

    @override
    def problem(self, row: Row, tokenizer: Tokenizer) -> ProblemGroupBuilder:
        self.check_fields(row)
        with importing("dataset.program", "es-cookbook[serve]", "starlette", "uvicorn"):
            from es_cookbook.plugins.program.env import Program, ProgramEnv, ProgramProblem
        program = Program(
            self._command,
            self.reward,
            self.at_once,
            self.rows_at_once,
            self.max_turns,
            tokenizer,
            self.key_in == "line",
        )
        return ProgramProblem(functools.partial(ProgramEnv, program, row), row.where)

    @property
    def _command(self) -> "Command":
        with importing("dataset.program", "es-cookbook[serve]", "starlette", "uvicorn"):
            from es_cookbook.plugins.program.command import Command

        seen = tuple(Path(path).absolute() for path in self.sandbox)
        return Command(command_of(self.program, "dataset.program"), seen)
