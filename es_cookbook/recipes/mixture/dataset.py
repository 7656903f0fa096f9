"""Countdown in three sizes: small numbers to begin with, the main job's, and four numbers."""

import chz
from typing_extensions import override

from es_cookbook.common.names import built_field
from es_cookbook.evolution.schedules import Table
from es_cookbook.plugins.mixtures.mixture import Mixture, Part, easy_pool
from es_cookbook.plugins.mixtures.selection import Curriculum, Filter, Replay
from es_cookbook.recipes.countdown.arithmetic import CountdownReward
from es_cookbook.recipes.countdown.dataset import CountdownDatasetBuilder

FADING = Table(generations=(0, 10, 20), factors=(0.5, 0.25, 0.0))
"""Share of easy problems: for a run of some tens of generations, `EASY_POOL` for thousands."""


@chz.chz
class CountdownMixture(Mixture):
    """Countdown in three sizes; `dataset.easy`, `dataset.main` and `dataset.hard` say which."""

    easy: CountdownDatasetBuilder = built_field(
        CountdownDatasetBuilder,
        "the pool that fades out",
        max_number=9,
        max_target=30,
        num_train=600,
        num_test=60,
    )
    main: CountdownDatasetBuilder = built_field(CountdownDatasetBuilder, "what is to be learned")
    hard: CountdownDatasetBuilder = built_field(
        CountdownDatasetBuilder,
        "problems beyond it",
        num_numbers=(4,),
        num_train=1000,
        num_test=100,
        reward=CountdownReward(answer_weight=1.0, format_weight=0.0),
    )
    fading: Table = chz.field(default=FADING, doc="share of easy problems by generation")
    hard_weight: float = chz.field(
        default=0.1, doc="share of hard problems beside the others' 1; 0 for none"
    )
    curriculum: Curriculum | None = built_field(Curriculum, "shares by recent performance, or None")
    filter: Filter | None = built_field(Filter, "leaves out what all or none solve, or None")
    replay: Replay | None = built_field(Replay, "replays earlier problems, or None")

    @property
    @override
    def members(self) -> tuple[Part, ...]:
        easy = Part(dataset=self.easy, tag="easy")
        main = Part(dataset=self.main, tag="main")
        hard = Part(dataset=self.hard, tag="hard", weight=self.hard_weight)
        return (*easy_pool(easy, main, self.fading), hard, *self.parts)
