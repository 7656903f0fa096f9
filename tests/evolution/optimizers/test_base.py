"""What optimizers have in common: numbers that are still to be found, and settings of others."""

from typing import Any, cast

import chz
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.optimizers.adam import Adam
from es_cookbook.evolution.optimizers.base import refuse_zero_sigma
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.evolution.spaces.full_rank import FullRankSpace
from es_cookbook.plugins.cma.optimizers import SepCMA
from es_cookbook.plugins.genetic.optimizer import Genetic
from tests.settled import settled


@chz.chz
class Fixed(ES):
    finds = ()


def test_what_a_recipe_sets_of_es_is_carried_over_but_what_cannot_be_found() -> None:
    es = {"population_size": 16, "learning_rate": 0.8, "sigma": "auto"}
    assert Adam.carried_over(es) == {**es, "learning_rate": 0.2}
    assert Fixed.carried_over(es) == {"population_size": 16, "learning_rate": 0.8}
    assert SepCMA.carried_over(es) == {"population_size": 16}


def test_optimizers_that_say_nothing_else_have_one_term_and_the_whole_rate() -> None:
    es = settled()(run_seed=0, num_generations=9, space=FullRankSpace({"x": (4,)}))
    assert (es.max_terms, es.records_scores) == (1, False)
    assert Genetic().rate_factor(3, 9) == 1.0
    genetic = Genetic()(run_seed=0, num_generations=9, space=FullRankSpace({"x": (4,)}))
    assert es.asks_ahead and not genetic.asks_ahead


def test_a_scheduled_sigma_stays_between_1e_minus_30_and_1e30() -> None:
    refuse_zero_sigma(lambda generation: (1e-30, 1.0, 1e30)[generation], 3)
    for wrong in (0.0, 0.9e-30, 1.1e30):
        with pytest.raises(ConfigError, match="at generation 2 of 3; sigma must stay above 0"):
            refuse_zero_sigma(lambda generation, wrong=wrong: (1.0, 1.0, wrong)[generation], 3)


def test_words_that_a_field_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match="moments"):
        Adam(moments=cast(Any, "some"))
