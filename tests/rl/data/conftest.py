"""A Hub on this machine, with one set."""

from pathlib import Path

import datasets
import pytest

from tests.hub_server import HubServer, Repository


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    hub.lead_here(monkeypatch, cache=tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    hub.repositories["datasets/me/data"] = Repository(False, {"train.jsonl": b'{"a": 7}\n'})
    return hub
