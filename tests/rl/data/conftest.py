"""A Hub on this machine, with one set."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from tests.hub_server import HubServer, Repository


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.lead_here(monkeypatch, cache=tmp_path / "cache")
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        server.repositories["datasets/me/data"] = Repository(False, {"train.jsonl": b'{"a": 7}\n'})
        yield server
