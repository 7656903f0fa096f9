"""Check that figures on the pages are those of recorded results.

    python -m docs.figures

prints what is wrong, and nothing if all is well. There are two checks:

- `docs/figures.toml` lists quotes by page. The numbers of a quote, from left to right, are those of
  its sources, rounded as they are quoted. A source is "FILE | ROW" of `benchmarks/results`, or
  "RUN before | METRIC" or "RUN after | METRIC", the first or the last metrics that were recorded of
  a recipe's run (`benchmarks.recipes`); " | FACTOR" may follow. "seed *" stands for seeds 0, 1 and
  2. A source is empty for a number that is no measurement, such as a setting, or not recorded.
- Each section with a measured figure names where it comes from: a command, a file of results, a
  paper, or the lab notes, for results of which no file was kept. If a benchmark that it names has
  no file, it says that metrics were not kept.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.recipes import DATA
from es_cookbook.runs.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[1]
QUOTES = Path(__file__).with_suffix(".toml")
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "es_cookbook").rglob("README.md")),
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_MEASURED = re.compile(
    r"\d(?: %| points?| ×| times| s\b| ms\b| minutes?| seconds?| min\b| nats| [kMG]i?B\b)"
)
_BENCHMARK = re.compile(r"python -m benchmarks\.(\w+)")
_SOURCE = re.compile(r"benchmarks|tools\.|es-cookbook |lab.notes|make \w+|arxiv", re.IGNORECASE)


def main() -> int:
    """Print what is wrong, and return the exit status."""
    found = wrong()
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def wrong() -> list[str]:
    """Return a sentence for each fault of the pages."""
    listed = tomllib.loads(QUOTES.read_text(encoding="utf-8"))
    not_measured = listed.pop("not_measured")
    unknown = {*without_source()}
    stale = [f"{each} has no figure, or a source" for each in {*not_measured} - unknown]
    bare = [f"{each} has a figure and no source" for each in unknown - {*not_measured}]
    return [*wrong_quotes(listed), *sorted(stale), *sorted(bare)]


def wrong_quotes(
    quotes: Mapping[str, Mapping[str, Sequence[str]]], root: Path = ROOT
) -> Iterator[str]:
    """Yield a sentence for each quote that is not on its page, or differs from its sources."""
    for page, of_page in quotes.items():
        text = " ".join((root / page).read_text(encoding="utf-8").split())
        for quote, given in of_page.items():
            numbers = [number.replace(",", "") for number in _NUMBER.findall(quote)]
            sources = [each for source in given for each in _of_seeds(source)]
            if quote not in text:
                yield f"{page} does not say {quote!r}"
            elif len(numbers) != len(sources):
                yield f"{page}: {quote!r} has {len(numbers)} numbers and {len(sources)} sources"
            for number, source in zip(numbers, sources, strict=False):
                if source and not is_rounded(number, value := value_of(source, root)):
                    yield f"{page}: {quote!r} has {number} where {source!r} is {value:g}"


def is_rounded(number: str, value: float) -> bool:
    """Return whether a number is a value, rounded to the digits that it has.

    >>> is_rounded("0.4", 0.351), is_rounded("0.4", 0.34), is_rounded("70.8", 70.75)
    (True, False, True)
    """
    unit = 10.0 ** -len(number.partition(".")[2])
    return abs(float(number) - value) <= unit / 2 * (1 + 1e-6)


def value_of(source: str, root: Path = ROOT) -> float:
    """Return the value of a source, times its factor."""
    name, row, *factor = source.split(" | ")
    name, _, when = name.partition(" ")
    if when:
        lines = list(read_metrics(DATA / f"{name}.jsonl"))
        value = lines[{"before": 0, "after": -1}[when]][row]
    else:
        result = json.loads((root / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        (value,) = (each["value"] for each in result["rows"] if each["name"] == row)
    return value * float(factor[0] if factor else 1)


def without_source(pages: Sequence[Path] = PAGES, root: Path = ROOT) -> Iterator[str]:
    """Yield page and heading of each section that has a measured figure and no source."""
    recorded = {path.stem.partition("-")[0] for path in (root / "benchmarks/results").glob("*")}
    for page in pages:
        for section in re.split(r"^(?=#+ )", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            has_figure = _MEASURED.search(section) and page.name != "lab_notes.md"
            is_kept = recorded.issuperset(_BENCHMARK.findall(section)) or "not kept" in section
            if has_figure and not (is_kept and _SOURCE.search(section)):
                yield f"{page.relative_to(root)}: {section.splitlines()[0]}"


def _of_seeds(source: str) -> list[str]:
    if "seed *" not in source:
        return [source]
    return [source.replace("seed *", f"seed {seed}") for seed in range(3)]


if __name__ == "__main__":
    raise SystemExit(main())
