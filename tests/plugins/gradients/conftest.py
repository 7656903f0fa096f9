"""The model that tests of gradients train."""

from pathlib import Path

import pytest

from tests.tiny_run import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has no padding token, and its end of sequence is outside of its vocabulary."""
    return write_tiny_model(tmp_path_factory.mktemp("gradients") / "model")
