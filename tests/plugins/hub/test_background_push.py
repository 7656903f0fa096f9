"""A run is pushed while it goes on, and no server, however bad, stops it or slows it."""

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from es_cookbook.common.errors import ConfigError, HubError
from es_cookbook.plugins.branches.fork import Fork, main
from es_cookbook.plugins.hub.background_push import HubPush
from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.base import RunInfo, Tracker
from es_cookbook.runs.tracking.jsonl import read_metrics
from es_cookbook.runs.tracking.trackers import TrackersBuilder
from tests.fakes import NoEngineBuilder
from tests.hub_server import TOKEN, HubServer, Repository
from tests.tiny_run import FILES_ALONE, tiny


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the package logged; huggingface_hub logs more where another test has let it."""
    ours = (record for record in caplog.records if record.name.startswith("es_cookbook"))
    return [record.getMessage() for record in ours]


def pushed(push: HubPush) -> TrackersBuilder:
    return TrackersBuilder(**FILES_ALONE, hub=push)


def run_info(path: Path) -> RunInfo:
    return RunInfo(path, config_json="{}", run_seed=0, num_generations=4)


async def until(push: Tracker, key: str, count: int) -> None:
    with anyio.fail_after(60):
        while push.metrics()[key] < count:
            await anyio.sleep(0.01)


async def test_a_run_is_pushed_after_every_so_many_generations(
    hub: HubServer, tmp_path: Path
) -> None:
    await train(tiny(tmp_path, num_generations=4))
    push = HubPush(repo_id="me/run", every=2, revision="g-{generation}")(run_info(tmp_path))
    push.recorded(1)  # Not due.
    push.recorded(4)
    await until(push, "hub/pushed", 1)
    push.close()
    assert set(hub.repositories["me/run"].branches) == {"main", "g-000000004"}
    recorded = (tmp_path / "history.jsonl").read_bytes()
    assert hub.files("me/run", "g-000000004")["run/history.jsonl"] == recorded
    assert push.metrics() == {"hub/pushed": 1.0, "hub/failed": 0.0}


async def test_a_fork_does_not_push_to_where_its_parent_does(
    hub: HubServer, tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    await train(tiny(Path(run), num_generations=1, trackers=pushed(HubPush(repo_id="me/run"))))
    with pytest.raises(ConfigError, match=r"trackers.hub must not be that of the other run"):
        main(Fork(log_path=run, output=f"{run}-2", trust=("tests", "hub:me/run")), {})
    main(Fork(log_path=run, output=f"{run}-2", trust=("tests",)), {"trackers.hub.repo_id": "me/2"})


async def test_what_failed_is_logged_once_counted_and_made_good_by_the_next_push(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(tiny(tmp_path, num_generations=3))
    push = HubPush(repo_id="me/run", every=1)(run_info(tmp_path))
    hub.fail_with = 501
    push.recorded(1)
    await until(push, "hub/failed", 1)
    push.recorded(2)
    await until(push, "hub/failed", 2)
    (sentence,) = said(caplog)
    assert sentence == (
        f"cannot push to me/run: {hub.url} answered with status 501; "
        "the run goes on, and the next push takes everything"
    )
    hub.fail_with = 403
    push.recorded(3)
    await until(push, "hub/failed", 3)
    assert "refuses repository me/run" in said(caplog)[1]
    hub.fail_with = None
    push.recorded(4)
    await until(push, "hub/pushed", 1)
    push.close()
    assert push.metrics() == {"hub/pushed": 1.0, "hub/failed": 3.0}
    assert len(said(caplog)) == 2
    kept = hub.files("me/run")["run/history.jsonl"]
    assert kept == (tmp_path / "history.jsonl").read_bytes()


async def test_a_push_that_is_due_during_another_starts_after_a_later_generation(
    hub: HubServer, tmp_path: Path
) -> None:
    await train(tiny(tmp_path, num_generations=3))
    hub.hang = 0.3
    push = HubPush(repo_id="me/run", every=1, revision="g{generation}")(run_info(tmp_path))
    for generations in range(1, 50):
        push.recorded(generations)
    hub.hang = 0
    await until(push, "hub/pushed", 1)
    await anyio.to_thread.run_sync(push.finish)
    assert set(hub.repositories["me/run"].branches) == {"main", "g000000001", "g000000049"}
    assert push.metrics() == {"hub/pushed": 2.0, "hub/failed": 0.0}


ASKED_AT_THE_START = 3
"""Requests before a model is loaded: make the repository, is it private, may one write."""


@pytest.mark.parametrize(
    "trouble",
    ["refuses the token", "fails", pytest.param("hangs", marks=pytest.mark.slow), "is not there"],
)
async def test_a_run_is_the_same_whatever_the_server_does_after_its_start(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    hub.fail_after = ASKED_AT_THE_START
    if trouble == "refuses the token":
        hub.fail_with = 401
    elif trouble == "fails":
        hub.fail_with = 500
    elif trouble == "hangs":
        hub.hang = 600
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    await train(tiny(tmp_path / "alone"))
    push = pushed(HubPush(repo_id="a/b", every=1, timeout=4))
    with anyio.fail_after(30):
        await train(tiny(tmp_path / "pushed", trackers=push))
    histories = [(tmp_path / n / "history.jsonl").read_bytes() for n in ("alone", "pushed")]
    assert histories[0] == histories[1]
    rows = read_metrics(tmp_path / "pushed" / "metrics.jsonl")
    assert all({"hub/pushed", "hub/failed"} <= set(row) for row in rows[:-1])
    assert any("cannot push to a/b" in message for message in said(caplog))


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        ("no token", "cannot push to me/run: HF_TOKEN is not set; make a token that may write at"),
        ("wrong token", "cannot push to me/run: http://{} does not accept the token that is set"),
        (
            "may not write",
            "cannot push to me/run: http://{} refuses repository me/run: the request was",
        ),
        ("public", "cannot push to me/run: me/run is public; make it private, or give private="),
    ],
)
async def test_a_push_that_the_hub_would_refuse_ends_the_run_before_a_model_is_loaded(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, sentence: str
) -> None:
    if trouble == "no token":
        monkeypatch.delenv("HF_TOKEN")
    elif trouble == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    elif trouble == "may not write":
        hub.repositories["me/run"] = Repository(private=True)
        hub.read_only = True
    else:
        hub.repositories["me/run"] = Repository(private=False)
    push = HubPush(repo_id="me/run")
    with pytest.raises(HubError) as caught:
        await train(tiny(tmp_path / "run", trackers=pushed(push), engine=NoEngineBuilder()))
    assert str(caught.value).startswith(sentence.format(hub.url[7:]))
    assert str(caught.value).endswith(
        "; a run without trackers.hub pushes nothing, and resume with trackers.hub=None"
    )
    assert not (tmp_path / "run" / "history.jsonl").exists()


@pytest.mark.parametrize("trouble", ["hangs", "fails", "is not there"])
def test_a_hub_that_is_out_of_reach_at_the_start_is_a_warning(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    if trouble == "hangs":
        hub.hang = 600
        monkeypatch.setattr("es_cookbook.plugins.hub.push.FIRST_SECONDS", 0.2)
        expected = "gave no usable answer (ReadTimeout"
    elif trouble == "fails":
        hub.fail_with = 501
        expected = "answered with status 501"
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        expected = "gave no usable answer (ConnectError: "
    HubPush(repo_id="me/run").check()
    (warning,) = said(caplog)
    assert expected in warning
    assert warning.endswith("; the run goes on, and tries it every trackers.hub.every generations")


async def test_the_end_of_a_run_is_on_the_hub_and_the_token_in_no_file_and_no_log(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await train(tiny(tmp_path, trackers=pushed(HubPush(repo_id="me/run", every=5))))
    names = ("config.json", "history.jsonl", "metrics.jsonl")
    assert hub.files("me/run") == {f"run/{name}": (tmp_path / name).read_bytes() for name in names}
    assert hub.repositories["me/run"].private
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) >= 4
    assert not any(TOKEN.encode() in path.read_bytes() for path in kept)
    assert not any(TOKEN.encode() in content for content in hub.files("me/run").values())
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"every": 0}, "every must be at least 1, found 0"),
        ({"revision": "{generations}"}, "revision must be a branch of at most"),
        ({"revision": "{generation}" * 30}, "revision must be a branch of at most 200"),
        ({"repo_id": "run"}, "repo_id must be owner/name in letters"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HubPush(**{"repo_id": "me/run"} | fields)
    assert str(caught.value).startswith(sentence)
