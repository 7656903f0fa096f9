"""A profile tells where a generation's time went, and costs a run nothing where there is none."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.runs.profile import MOST_GENERATIONS
from es_cookbook.runs.program import default_log_path, train
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.tiny_run import TinyConfig, tiny, write_tiny_model

pytestmark = pytest.mark.anyio


def config(log_path: Path, **fields: Any) -> TinyConfig:
    return tiny(log_path, **{"profile": True} | fields)


def events(log_path: Path) -> list[dict[str, Any]]:
    return json.loads((log_path / "profile.json").read_text())["traceEvents"]


def spans(log_path: Path, process: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Track -> its spans, in order."""
    found = [event for event in events(log_path) if event["pid"] == process]
    tracks = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    by_track: dict[str, list[dict[str, Any]]] = {name: [] for name in tracks.values()}
    for event in found:
        if event["ph"] == "X":
            by_track[tracks[event["tid"]]].append(event)
    return {name: sorted(each, key=lambda e: e["ts"]) for name, each in by_track.items()}


def within(track: list[dict[str, Any]], generation: Mapping[str, Any]) -> float:
    """Seconds of a track's spans in a generation."""
    began, ended = generation["ts"], generation["ts"] + generation["dur"]
    parts = [min(e["ts"] + e["dur"], ended) - max(e["ts"], began) for e in track]
    return sum(max(part, 0.0) for part in parts) / 1e6


async def test_spans_of_engine_lanes_and_loop_add_up_to_a_generation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    await train(
        config(
            tmp_path / "run",
            model_name=str(model),
            engine=TinyConfig(model_name="x", log_path="x").engine,
            num_generations=4,
        )
    )
    tracks = spans(tmp_path / "run")
    lanes = [name for name in tracks if name.startswith("engine, lane ")]
    assert lanes
    assert set(tracks) == {"generations", "loop", "engine", "environments", *lanes}
    for name, track in tracks.items():
        for one, next_one in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 0.2, name  # Rounded, in µs.
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    generations = tracks["generations"]
    assert [span["name"] for span in generations] == [f"generation {t}" for t in range(4)]
    for generation, row in zip(generations, rows, strict=False):
        assert generation["dur"] / 1e6 == pytest.approx(row["time/total"], abs=1e-4)
        for name in ("engine", *lanes):
            assert within(tracks[name], generation) == pytest.approx(row["time/total"], rel=0.05)
        assert 0.6 * row["time/total"] < within(tracks["loop"], generation) <= row["time/total"]
    assert {span["name"] for span in tracks["engine"]} == {"load", "sample", "apply", "idle"}
    assert {span["name"] for span in tracks[lanes[0]]} == {"sample", "idle"}
    assert {span["name"] for span in tracks["environments"]} == {"score"}
    assert {"ask", "rollout", "score", "tell", "apply", "record", "evaluate"} == {
        span["name"] for span in tracks["loop"]
    }
    out = capsys.readouterr().out
    assert out.count("of a generation went (mean of 4 generations):") == 1
    assert f"written to {tmp_path / 'run' / 'profile.json'}" in out


async def test_a_resumed_run_adds_a_process_to_what_is_there(tmp_path: Path) -> None:
    await train(config(tmp_path, num_generations=2))
    await train(config(tmp_path, num_generations=3))
    assert [s["name"] for s in spans(tmp_path, 1)["generations"]] == [
        "generation 0",
        "generation 1",
    ]
    assert [s["name"] for s in spans(tmp_path, 2)["generations"]] == ["generation 2"]


@pytest.mark.parametrize("there", [b"\xff", b"[", b"[1]", b'{"traceEvents": [{"pid": "1"}]}'])
async def test_a_file_that_is_no_profile_gives_way(tmp_path: Path, there: bytes) -> None:
    await train(config(tmp_path, num_generations=1, profile=False))
    (tmp_path / "profile.json").write_bytes(there)
    await train(config(tmp_path, num_generations=2))
    assert [span["name"] for span in spans(tmp_path)["generations"]] == ["generation 1"]


async def test_only_the_first_generations_are_profiled(tmp_path: Path) -> None:
    await train(config(tmp_path, num_generations=MOST_GENERATIONS + 2, eval_every=0))
    assert len(spans(tmp_path)["generations"]) == MOST_GENERATIONS


async def test_without_it_nothing_is_written_and_a_run_keeps_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without, with_it = config(tmp_path, num_generations=1, profile=False), config(tmp_path)
    await train(without)
    assert not (tmp_path / "profile.json").exists()
    assert "of a generation went" not in capsys.readouterr().out
    assert default_log_path(config(tmp_path, profile=False), "x") == default_log_path(with_it, "x")
