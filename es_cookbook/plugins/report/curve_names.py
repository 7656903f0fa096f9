"""Names of curves: runs that differ in their seed alone are one curve.

A curve is named by its method and the fields in which the runs shown together differ.
"""

from collections import Counter
from collections.abc import Sequence

from es_cookbook.common.terminal import one_line
from es_cookbook.runs.tracking.reading import RunFiles, class_name, is_of_training, method_of

_MOST_NAMED = 3
"""Fields in the name of a curve."""
_SAYS_LITTLE = ("num_generations", "eval_", "dataset.num_", "snapshot_", "engine", "model_name")


def grouped(runs: Sequence[RunFiles]) -> dict[str, list[RunFiles]]:
    """Group runs into curves, by name (method and differing fields)."""
    groups: dict[object, list[RunFiles]] = {}
    for run in runs:
        fields = frozenset((path, str(v)) for path, v in run.config.items() if _tells_apart(path))
        groups.setdefault((method_of(run), fields or run.path), []).append(run)
    by_method: dict[str, list[list[RunFiles]]] = {}
    for group in groups.values():
        by_method.setdefault(method_of(group[0]), []).append(group)
    named: list[tuple[str, list[RunFiles]]] = []
    for method, alike in by_method.items():
        paths = differing([group[0] for group in alike])
        paths.sort(key=lambda path: path.startswith(_SAYS_LITTLE))
        named += [(_name(method, group[0], paths[:_MOST_NAMED]), group) for group in alike]
    counts = Counter(name for name, _ in named)
    return {
        name if counts[name] == 1 else f"{name} ({one_line(str(group[0].path))})": group
        for name, group in named
    }


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """Return fields that differ among Configs; those of another class are left out."""
    configs = [run.config for run in runs if run.config]
    found: list[str] = []
    for path in dict.fromkeys(path for config in configs for path in config):
        is_explained = path.startswith(tuple(f"{field}." for field in found))
        values = {repr(config.get(path)) for config in configs}
        if _tells_apart(path) and not is_explained and len(values) > 1:
            found.append(path)
    return found


def _tells_apart(path: str) -> bool:
    return path != "seed" and is_of_training(path)


def _name(method: str, run: RunFiles, paths: Sequence[str]) -> str:
    there = {path: run.config[path] for path in paths if path in run.config}
    told = (
        class_name(value) or f"{path.rpartition('.')[2]}={one_line(str(value))}"
        for path, value in there.items()
    )
    return ", ".join([method, *told])
