"""What optimizers have in common: numbers that are still to be found, and settings of others."""

import chz
import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.optimizers.adam import Adam
from es_cookbook.evolution.optimizers.base import refuse_zero_sigma
from es_cookbook.evolution.optimizers.es import ES
from es_cookbook.plugins.cma.optimizers import SepCMA


@chz.chz
class Fixed(ES):
    finds = ()


def test_what_a_recipe_sets_of_es_is_carried_over_but_what_cannot_be_found() -> None:
    es = {"population_size": 16, "learning_rate": 0.8, "sigma": "auto"}
    assert Adam.carried_over(es) == {**es, "learning_rate": 0.2}
    assert Fixed.carried_over(es) == {"population_size": 16, "learning_rate": 0.8}
    assert SepCMA.carried_over(es) == {"population_size": 16}


def test_a_scheduled_sigma_stays_between_1e_minus_30_and_1e30() -> None:
    refuse_zero_sigma(lambda generation: (1e-30, 1.0, 1e30)[generation], 3)
    for wrong in (0.0, 0.9e-30, 1.1e30):
        with pytest.raises(ConfigError, match="at generation 2 of 3; sigma must stay above 0"):
            refuse_zero_sigma(lambda generation, wrong=wrong: (1.0, 1.0, wrong)[generation], 3)
