"""A profile tells where a generation's time went, and costs a run nothing where there is none."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from es_cookbook.runs.program import train
from es_cookbook.runs.tracking.jsonl import read_metrics
from tests.tiny_run import TinyConfig, tiny, write_tiny_model


def config(log_path: Path, **fields: Any) -> TinyConfig:
    return tiny(log_path, **{"profile": True} | fields)


def events(log_path: Path) -> list[dict[str, Any]]:
    return json.loads((log_path / "profile.json").read_text())["traceEvents"]


def spans(log_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Track -> its spans, in order."""
    found = events(log_path)
    tracks = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    by_track: dict[str, list[dict[str, Any]]] = {name: [] for name in tracks.values()}
    for event in found:
        if event["ph"] == "X":
            by_track[tracks[event["tid"]]].append(event)
    return {name: sorted(each, key=lambda e: e["ts"]) for name, each in by_track.items()}


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
    assert set(tracks) == {"loop", "engine", "environments", *lanes}
    for name, track in tracks.items():
        for one, next_one in itertools.pairwise(track):
            assert one["ts"] + one["dur"] <= next_one["ts"] + 0.2, name  # Rounded, in µs.
    assert {span["name"] for span in tracks["engine"]} == {"load", "sample", "apply"}
    assert {span["name"] for span in tracks[lanes[0]]} == {"sample"}
    assert {span["name"] for span in tracks["environments"]} == {"score"}
    assert {"ask", "rollout", "fitness", "tell", "apply", "record", "evaluate"} == {
        span["name"] for span in tracks["loop"]
    }
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    seconds = sum(row.get("time/ask", 0.0) for row in rows)
    asked = sum(span["dur"] for span in tracks["loop"] if span["name"] == "ask") / 1e6
    assert asked == pytest.approx(seconds, abs=1e-4)
    said = capsys.readouterr().out
    assert f"the profile is in {tmp_path / 'run' / 'profile.json'}" in said
