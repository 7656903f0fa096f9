"""An evaluation as a JSON file, with every problem, from which another can be compared with it.

What is read may be anybody's: it is numbers and names, and nothing in it is called or imported.
"""

import dataclasses
import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import es_cookbook
from es_cookbook.commands.evaluate.measuring import Evaluation, Setting
from es_cookbook.common.configs import config_to_json
from es_cookbook.common.errors import ConfigError
from es_cookbook.common.files import LARGEST_TEXT, parsed, read_file
from es_cookbook.population.results import Comparison, Estimate, Results
from es_cookbook.rl.objectives import Outcomes

_MOST_VALUES = 2**23
"""Of a hundred thousand problems."""
FORMAT = "es_cookbook evaluation 1"
_PACKAGES = ("numpy", "torch", "transformers")


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """An evaluation that was written earlier, and how it was made."""

    evaluation: Evaluation
    settings: Mapping[str, object]


def to_json(
    setting: Setting,
    evaluation: Evaluation,
    estimates: Mapping[str, Mapping[str, Estimate]],
    against: Evaluation | None = None,
    comparisons: Sequence[Comparison] = (),
) -> str:
    """Everything that was measured; unknown numbers are null.

    `estimates` are by tag, `all` for all problems, and metric.
    """
    config = setting.config
    plain = {
        "format": FORMAT,
        **_described(evaluation),
        "settings": {
            "problems": setting.problems or "the run's own",
            "split": setting.split,
            "attempts": setting.attempts,
            "temperature": setting.temperature,
            "sampling.max_tokens": config.sampling.max_tokens,
            "sampling.top_p": config.sampling.top_p,
            "seed": config.seed,
            "rollout_timeout": config.rollout_timeout,
            "turn_timeout": config.turn_timeout,
            "dataset": json.loads(config_to_json(config.dataset)),
        },
        "estimates": {
            tag: {metric: dataclasses.asdict(found) for metric, found in of_tag.items()}
            for tag, of_tag in estimates.items()
        },
        "lost": dict(evaluation.results.lost),
        "against": against and _described(against),
        "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons],
        "versions": {
            "es_cookbook": es_cookbook.__version__,
            "python": platform.python_version(),
            **{package: version(package) for package in _PACKAGES},
        },
        "problems": _problems(evaluation.results),
    }
    text = json.dumps(_without_nan(plain), indent=1, ensure_ascii=False, allow_nan=False)
    return text + "\n"


def read(path: Path) -> Saved:
    """Read what `to_json` wrote.

    Raises:
        ConfigError: It cannot be read, or is something else; names the file.
    """
    try:
        plain = parsed(read_file(path, LARGEST_TEXT, None), _MOST_VALUES)
        if not isinstance(plain, dict) or cast("dict[str, object]", plain).get("format") != FORMAT:
            raise ConfigError(f"{path} is no evaluation that this version can read ({FORMAT!r})")
        return _saved(cast("dict[str, Any]", plain))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is damaged, or was changed: {type(error).__name__}: {error}"[:300]
        ) from error


def _described(evaluation: Evaluation) -> dict[str, object]:
    return {
        "name": evaluation.name,
        "generation": evaluation.generation,
        "model": dict(evaluation.model),
        "metrics": dict(evaluation.metrics),
        "trained_on": evaluation.trained_on,
    }


def _problems(results: Results) -> list[dict[str, object]]:
    metrics = results.outcomes.metrics
    return [
        {
            "name": name,
            "tags": list(results.tags_P[p]),
            "reward": results.outcomes.rewards_P_G_K[p, 0].tolist(),
            "tokens": results.outcomes.tokens_P_G_K[p, 0].tolist(),
            "metrics": {metric: metrics[metric][p, 0].tolist() for metric in sorted(metrics)},
            "lost": list(results.lost_P[p]),
        }
        for p, name in enumerate(results.names_P)
    ]


def _saved(plain: Mapping[str, Any]) -> Saved:
    problems: list[dict[str, Any]] = plain["problems"]
    metrics = {metric for problem in problems for metric in problem["metrics"]}
    results = Results(
        names_P=[str(problem["name"]) for problem in problems],
        tags_P=[tuple(map(str, problem["tags"])) for problem in problems],
        outcomes=Outcomes(
            _values([problem["reward"] for problem in problems]),
            _values([problem["tokens"] for problem in problems]),
            {m: _values([problem["metrics"][m] for problem in problems]) for m in metrics},
        ),
        lost_P=[list(map(str, problem["lost"])) for problem in problems],
    )
    generation = plain["generation"]
    evaluation = Evaluation(
        name=str(plain["name"]),
        generation=None if generation is None else int(generation),
        model={str(key): value and str(value) for key, value in plain["model"].items()},
        metrics={
            str(name): math.nan if value is None else float(value)
            for name, value in plain["metrics"].items()
        },
        results=results,
        trained_on=None if (count := plain.get("trained_on")) is None else int(count),
    )
    return Saved(evaluation, dict(plain["settings"]))


def _values(values_P_K: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    found = np.array(values_P_K, dtype=np.float64)
    if found.ndim != 2 or not found.size:
        raise ValueError("every problem must have as many attempts, and at least one")
    return found[:, None, :]


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return {key: _without_nan(entry) for key, entry in items}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in cast("Sequence[object]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
