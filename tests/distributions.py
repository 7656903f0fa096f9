"""Distributions as Python finds them: metadata that registers parts, without an installation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from es_cookbook.common import registry


class Register(Protocol):
    """What the fixture `register` gives."""

    def __call__(
        self,
        groups: Mapping[str, Mapping[str, str]],
        name: str = "other",
        version: str = "1.0",
        api: str | None = registry.API,
    ) -> Path:
        """Put a distribution's metadata on Python's path, where its modules may lie too.

        Args:
            groups: without `es_cookbook.` before them -> its parts.
            name: of the distribution.
            version: of it.
            api: the version of the interface that it is made for; None: it says none.

        Returns:
            The folder of its modules.
        """
        ...


def write_metadata(
    folder: Path, groups: Mapping[str, Mapping[str, str]], name: str, version: str, api: str | None
) -> None:
    """Write the metadata of a distribution as an installation would leave it in a folder."""
    every = {**groups, **({} if api is None else {"api": {api: name}})}
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[es_cookbook.{group}]\n" + "".join(f"{each} = {of}\n" for each, of in parts.items())
            for group, parts in every.items()
        )
    )
