"""What optimizers have in common: numbers that are still to be found, and settings of others."""

import chz

from es_cookbook.evolution.optimizers.adam import Adam
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
