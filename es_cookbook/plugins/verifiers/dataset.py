"""A taskset of the verifiers library as a data set.

    es-cookbook train environment=my_taskset model_name=Qwen/Qwen2.5-0.5B-Instruct

`my_taskset` is an installed package that exports a `Taskset` of verifiers' v1. Its code runs in
this process, with your rights.
"""

import json
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, ClassVar, cast

import chz
import chz.factories
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.common.errors import DataError, importing
from es_cookbook.common.trust import is_plain_option, needs_trust
from es_cookbook.rl.data.problem_dataset import ProblemDataset
from es_cookbook.rl.messages.chat import Chat, ChatOptions
from es_cookbook.rl.problem_env import digest_of
from es_cookbook.rl.types import Datasets, RLDatasetBuilder, Tokenizer

if TYPE_CHECKING:
    from es_cookbook.plugins.verifiers.library import Source


class _Package(chz.factories.MetaFactory):
    """A user writes the name of a package; the value is the taskset's class.

    So a config names a class, which is imported only if the package is trusted.
    """

    def unspecified_factory(self) -> Callable[..., object] | None:
        return None

    def from_string(self, factory: str) -> Callable[..., object]:
        raise chz.factories.MetaFromString(f"{factory!r} is the name of a package")

    def perform_cast(self, value: str) -> object:
        with importing(f"environment={value}", "es-cookbook[verifiers]", "verifiers"):
            from es_cookbook.plugins.verifiers.library import find_taskset
        return find_taskset(value)


def _options(problems: "TasksetProblems") -> str | None:
    """Return the trust that options need which could name files or code; else None."""
    try:
        given = json.loads(problems.options)
    except (ValueError, RecursionError):
        given = None
    options = cast("dict[str, object]", given) if isinstance(given, dict) else {"": given}
    if all(map(is_plain_option, options.values())):
        return None
    return f"options:{problems.taskset.__module__.partition('.')[0]}"


@chz.chz
class TasksetProblems(RLDatasetBuilder):
    """The tasks of a taskset, for training and, disjoint from it, for the held-out test.

    A task is held out by its content, so duplicates are in the same split, and every seed has the
    same test.
    """

    environment: ClassVar[str] = "taskset"
    taskset: type = chz.field(
        meta_factory=_Package(), doc="installed package that exports a taskset of verifiers (v1)"
    )
    options: str = chz.field(
        default="{}",
        doc='options of the taskset, as JSON: \'{"game": "Hangman-v0"}\'',
        metadata=needs_trust(_options, "are options of a package, and can name files and code"),
    )
    num_train: int = chz.field(default=10_000, doc="maximum number of training tasks")
    num_test: int = chz.field(default=200, doc="maximum number of held-out tasks; 0: none")
    test_fraction: float = chz.field(default=0.1, doc="maximum share of tasks that are held out")
    problems_per_generation: int = chz.field(default=32, doc="tasks in a batch")
    seed: int = chz.field(default=0, doc="seed for the order of the training tasks")
    chat: ChatOptions = chz.field(
        default_factory=ChatOptions, doc="turns, tokens and tools of a rollout"
    )

    _counts = in_range("num_train", "problems_per_generation", at_least=1)
    _num_test = in_range("num_test", at_least=0)
    _test_fraction = in_range("test_fraction", above=0, at_most=0.5)

    @property
    @override
    def label(self) -> str:
        return self._source().package

    @override
    def check(self) -> None:
        self._source().tasks(1)

    def _source(self) -> "Source":
        from es_cookbook.plugins.verifiers.library import Source

        return Source(self.taskset, self.options)

    @override
    async def __call__(self, tokenizer: Tokenizer) -> Datasets:
        from es_cookbook.plugins.verifiers.env import TaskBuilder
        from es_cookbook.plugins.verifiers.tools import described_tools

        source = self._source()
        tasks = source.tasks(self.num_train + self.num_test)
        chat = Chat(tokenizer, self.chat, await described_tools(source.env, tasks[0]))
        builders = [
            TaskBuilder(source, task, f"{source.package}, task {task.data.idx}", chat)
            for task in tasks
        ]
        held_out = self._held_out({builder.content for builder in builders})
        train_P = [builder for builder in builders if builder.content not in held_out]
        test_P = [builder for builder in builders if builder.content in held_out]
        del train_P[self.num_train :], test_P[self.num_test :]
        if not train_P:
            raise DataError(f"the taskset {source.package} leaves no tasks to train on")
        dataset = ProblemDataset(train_P, self.problems_per_generation, self.seed, test_P)
        return Datasets(dataset, test_P)

    def _held_out(self, contents: Collection[str]) -> set[str]:
        """Return the contents of held-out tasks: an arbitrary share, always the same."""
        most = min(self.num_test, math.ceil(self.test_fraction * len(contents)))
        in_order = sorted(contents, key=lambda each: digest_of(each).to_bytes(8, "little"))
        return set(in_order[:most])
