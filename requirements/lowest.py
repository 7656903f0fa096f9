"""Prints the lowest versions that pyproject.toml allows as constraints: pip has no mode for them.

    python requirements/lowest.py > build/lowest.txt

`make lowest` installs under them and runs the fast tests. Dependencies of dependencies are left to
pip, which takes the newest that go with these.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(project: Mapping[str, Any]) -> Iterator[str]:
    """Those of the package and of all its extras, each as it is written."""
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        yield from (each for each in group if not each.startswith("es-cookbook["))


def lowest(requirement: str) -> str:
    """A requirement at its lower bound, with the marker that it has.

    >>> lowest("trl>=1.16,<2")
    'trl==1.16'
    >>> lowest("pyright[nodejs]>=1.1.400")
    'pyright==1.1.400'
    >>> lowest("triton>=3.2; platform_system == 'Linux'")
    "triton==3.2; platform_system == 'Linux'"
    """
    bounded = re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)(?:,[^;]*)?(;.*)?", requirement)
    assert bounded, f"{requirement} has no lower bound"
    name, version, marker = bounded.groups(default="")
    return f"{name}=={version}{marker}"


if __name__ == "__main__":
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    print("\n".join(sorted({lowest(each) for each in requirements(project)})))
