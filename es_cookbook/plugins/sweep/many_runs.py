"""Checks of commands that train many runs: the options that each run gets, and what is compared."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from es_cookbook.common.errors import ConfigError


def check_not_set(paths: Iterable[str], command: str, refused: Mapping[str, str]) -> None:
    """Refuse options of runs that a command of many runs sets itself.

    Args:
        paths: the options, by dotted path.
        command: the command, in a word.
        refused: more options that it sets -> why.

    Raises:
        ConfigError: The first such option.
    """
    set_here = {
        "seed": "seeds=... says which",
        "log_path": f"every run has its own directory in the {command}'s log_path",
        "behavior_if_log_dir_exists": f"a {command} always goes on with what is recorded",
        **refused,
    }
    for path in paths:
        if path in set_here:
            raise ConfigError(f"{path} cannot be given: {set_here[path]}")


def by_label(
    fields: Mapping[str, str], labels: Collection[str], names: Collection[str], what: str
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Split options into those of every run and, by label, those of one: `label.field`.

    `names` are all that may be compared, and `what` is one of them in a word.

    Raises:
        ConfigError: An option of one that is not compared.
    """
    of_all: dict[str, str] = {}
    of_one: dict[str, dict[str, str]] = {label: {} for label in labels}
    for path, value in fields.items():
        first, _, rest = path.partition(".")
        if first in of_one and rest:
            of_one[first][rest] = value
        elif first in names:
            raise ConfigError(
                f"{path} is an option of {what} that is not compared; they are {', '.join(labels)}"
            )
        else:
            of_all[path] = value
    return of_all, of_one


def check_comparison(metric: str, lists: Mapping[str, Sequence[object]]) -> None:
    """Refuse lists that are empty or name something twice, and metrics that are not held out.

    Raises:
        ConfigError: Names the option.
    """
    for field, values in lists.items():
        if not values:
            raise ConfigError(f"{field} must name at least one, found none")
        if len(set(values)) < len(values):
            raise ConfigError(f"{field} must be different ones, found {tuple(values)}")
    if not metric.startswith("test/"):
        raise ConfigError(f"metric must be a held-out one, test/..., found {metric!r}")
