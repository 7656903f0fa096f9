"""Settings of papers, as options of a run: `es-cookbook train preset=copes ...`.

A preset stands behind the options that a user gives: each of those wins, and is told, because the
run is then no longer what the paper describes. The formulas that a preset leads to are compared
with the papers' in tests/runs/test_presets.py; docs/hyper_parameters.md says what of a paper its
options do not say.
"""

from collections.abc import Mapping

from es_cookbook.common.cli import Preset

_PLAIN = {
    "optimizer": "es",
    "optimizer.learning_rate_schedule": "none",
    "optimizer.sigma_schedule": "none",
    "sampling.temperature": "0.0",
    "surrogate": "None",
}
_ES_AT_SCALE = {
    **_PLAIN,
    "search_space": "full_rank",
    "fitness": "zscore",
    "optimizer.sigma": "0.001",
    "optimizer.learning_rate": "0.0005",
    "optimizer.antithetic": "False",
    "optimizer.population_size": "30",
    "dataset.problems_per_generation": "200",
}
PRESETS: Mapping[str, Preset] = {
    "es_at_scale": Preset(_ES_AT_SCALE, "arXiv:2509.24372"),
    "eggroll": Preset(
        {
            **_PLAIN,
            "search_space": "low_rank",
            "search_space.rank": "1",
            "optimizer.antithetic": "True",
            "fitness": "per_problem_baseline",
        },
        "arXiv:2511.16652",
    ),
    "copes": Preset(
        {
            **_ES_AT_SCALE,
            "search_space.partitions": "4",
            # α is that of each part's own N/K genomes: √K · α of our step, α/N · √K · Σ.
            "optimizer.learning_rate": "0.001",
            "optimizer.population_size": "40",
            "dataset.problems_per_generation": "64",
        },
        "arXiv:2608.02391",
    ),
    "essam": Preset(
        {
            **_ES_AT_SCALE,
            "optimizer.sigma": "0.0015",
            "optimizer.learning_rate": "0.00025",
            "optimizer.sharpness": "0.0001",
            "optimizer.population_size": "40",
        },
        "arXiv:2602.01003",
    ),
    "anchored": Preset(
        {
            **_ES_AT_SCALE,
            # Decay follows the step there: base + (1 - αλ) (centre + step - base), with λ = 10.
            "optimizer.weight_decay": "0.005",
            "optimizer.learning_rate": "0.0004975",
        },
        "arXiv:2605.30148",
    ),
    "randopt": Preset(
        {
            **_ES_AT_SCALE,
            "optimizer.learning_rate": "0.0",
            "optimizer.population_size": "5000",
            "num_generations": "1",
        },
        "arXiv:2603.12228",
    ),
}
"""By the name of the method."""
