"""Several tasks of the chat recipe in one run, each with a share of the batch and its own test."""

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.plugins.mixtures.mixture import Mixture, Part
from es_cookbook.recipes.chat.dataset import ChatDatasetBuilder
from es_cookbook.recipes.chat.problems import Task
from es_cookbook.rl.data.generated import FOLDS


@chz.chz
class ChatMixture(Mixture):
    """Tasks of the chat recipe in equal shares; metrics are reported for each by its name."""

    tasks: tuple[Task, ...] = chz.field(default=("sums", "extraction"), doc="tasks of recipe chat")
    problems_per_generation: int = chz.field(default=8, doc="problems in a batch")
    num_train: int = chz.field(default=1000, doc="most training problems of a task")
    num_test: int = chz.field(default=100, doc="most held-out problems of a task; 0 for none")
    fold: int = chz.field(
        default=0, doc="which problems are held out: 0, those of the test; 1, to choose settings on"
    )

    _fold = in_range("fold", at_least=0, at_most=FOLDS - 1)

    @property
    @override
    def members(self) -> tuple[Part, ...]:
        shared = ChatDatasetBuilder(
            fold=self.fold, seed=self.seed, num_train=self.num_train, num_test=self.num_test
        )
        datasets = [chz.replace(shared, task=task) for task in self.tasks]
        return (*(Part(dataset=each, tag=each.task, weight=1.0) for each in datasets), *self.parts)
