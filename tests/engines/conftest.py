"""Tiny models, each written once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, by family."""
    root = tmp_path_factory.mktemp("tiny_models")

    def path_of(family: str) -> Path:
        path = root / family
        return path if path.exists() else make_tiny_model(family, path)

    return path_of
