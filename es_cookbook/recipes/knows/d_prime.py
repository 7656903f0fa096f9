"""Type-2 d′ of a run's held-out evaluations: how far "yes" tells right answers from wrong ones.

    python -m es_cookbook.recipes.knows.d_prime log_path=runs/knows

d′ = z(P(yes | right)) - z(P(yes | wrong)), in standard deviations: 0 if "yes" says nothing about
the answer, however often it is said. Shares are (n + ½) / (N + 1), so that none is 0 or 1 (Hautus
1995, Behavior Research Methods 27, 46-51). The standard error is that of Gourevitch and Galanter
1967 (Psychometrika 32, 25-33), from the same shares.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist

import chz

from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.rollouts import REPORTED
from es_cookbook.runs.directory.directory import METRICS, read_metrics
from es_cookbook.runs.tracking.base import GENERATION

_NORMAL = NormalDist()
_YES = "test/env/all/yes"


def d_prime(hits: float, right: float, false_alarms: float, wrong: float) -> tuple[float, float]:
    """Return d′ and its standard error.

    >>> [round(value, 2) for value in d_prime(8, 10, 2, 10)]
    [1.5, 0.59]

    Args:
        hits: times that the model said yes where its answer was right.
        right: problems whose answer was right.
        false_alarms: times that the model said yes where its answer was wrong.
        wrong: problems whose answer was wrong.
    """
    found, variance = [0.0, 0.0], 0.0
    for i, (yes, count) in enumerate(((hits, right), (false_alarms, wrong))):
        share = (yes + 0.5) / (count + 1)
        found[i] = _NORMAL.inv_cdf(share)
        variance += share * (1 - share) / ((count + 1) * _NORMAL.pdf(found[i]) ** 2)
    return found[0] - found[1], math.sqrt(variance)


def of_evaluation(metrics: Mapping[str, float], tag: str = "all") -> tuple[float, float] | None:
    """Return d′ of an evaluation and its error; None without right, or wrong, answers."""
    names = [f"env/{tag}/yes_if_{which}" for which in ("right", "wrong")]
    right, wrong = (metrics.get(f"test/{REPORTED}{name}", 0.0) for name in names)
    if not right or not wrong:
        return None
    hits, false_alarms = (metrics[f"test/{name}"] for name in names)
    return d_prime(hits * right, right, false_alarms * wrong, wrong)


@chz.chz
class Config:
    """The run to measure."""

    log_path: str = chz.field(doc="directory of a run of the recipe knows")


def main(config: Config) -> None:
    """Print a line for each evaluation and kind of question.

    Raises:
        ConfigError: The run has no evaluation of this recipe.
    """
    rows = [row for row in read_metrics(Path(config.log_path) / METRICS) if _YES in row]
    if not rows:
        raise ConfigError(f"log_path={config.log_path}: no evaluation of the recipe knows is there")
    print(f"{'generation':>10}  questions   right  agrees     yes  d'")
    for row in rows:
        for tag in ("all", "facts", "sums"):
            if f"test/env/{tag}/yes" not in row:
                continue  # Few held-out questions can be all of one kind.
            shares = [row[f"test/env/{tag}/{name}"] for name in ("correct", "agrees", "yes")]
            found = of_evaluation(row, tag)
            told = "-" if found is None else f"{found[0]:.2f} ± {found[1]:.2f}"
            columns = "  ".join(f"{share:6.1%}" for share in shares)
            print(f"{row[GENERATION]:>10.0f}  {tag:<9}  {columns}  {told}")


if __name__ == "__main__":
    run_cli(main, Config)
