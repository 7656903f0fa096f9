"""What TensorBoard's own reader finds in the files of a run."""

import logging
import sys
from pathlib import Path

import pytest

from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.types import Action, Observation, Trajectory, TrajectoryGroup, Transition
from es_cookbook.runs.tracking.base import RunInfo
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder
from es_cookbook.runs.tracking.tensorboard_tracker import TensorboardTrackerBuilder

pytestmark = pytest.mark.slow
CONFIG = '{"optimizer": {"$class": "some.module:ES", "sigma": 0.5}}'


def group() -> TrajectoryGroup:
    action = Action((1,), "# <b>bold</b>\n\x1b[31mred", "stop")
    transition = Transition(Observation((2, 3)), action, 1.0, {}, {})
    return TrajectoryGroup([[Trajectory((transition,))]], tags=("a tag",))


def test_scalars_and_texts_come_back_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    builder = TensorboardTrackerBuilder(rollouts_every=2)
    # The first process was ended before generation 1 counted; the second does it again.
    for start, values in ((0, (0.25, 0.5)), (1, (0.75, float("nan"), 1.0))):
        tracker = builder(RunInfo(tmp_path, CONFIG, 0, 4, start_generation=start))
        for generation, value in enumerate(values, start):
            tracker.log_rollouts(generation, [group()], lambda tokens_T: "<i>prompt</i>")
            tracker.log(generation, {"reward/mean": value, "progress/tokens": 7})
        tracker.close()
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"tensors": 0, "scalars": 0})
    events.Reload()
    read = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert read == [(0, 0.25), (1, 0.75), (3, 1.0)]
    (config, *_) = events.Tensors("config")
    (text,) = config.tensor_proto.string_val
    assert b'    "class": "ES",' in text
    rollouts = events.Tensors("rollouts")
    assert [event.step for event in rollouts] == [0, 2]
    (text,) = rollouts[0].tensor_proto.string_val
    lines = text.decode().splitlines()
    assert all(line.startswith("    ") for line in lines), "of Markdown, code"
    assert "    answer: # &lt;b&gt;bold&lt;/b&gt;" in lines
    assert r"    \x1b[31mred" in lines
    assert "    prompt: &lt;i&gt;prompt&lt;/i&gt;" in lines


def test_a_failure_of_tensorboard_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        tracker = TensorboardTrackerBuilder()(RunInfo(tmp_path, "{}", 0, 3))
        tracker.log_rollouts(0, [group()], str)
        tracker.log(0, {"reward/mean": 1.0})
        tracker.close()
    assert [text for text in caplog.messages if "TensorBoard is off" in text] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_library_that_is_not_installed_is_told_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    from es_cookbook.runs.tracking.trackio_tracker import TrackioTrackerBuilder

    builders = {
        "tensorboard": StandardTrackersBuilder(tensorboard=TensorboardTrackerBuilder()),
        "trackio": StandardTrackersBuilder(trackio=TrackioTrackerBuilder(project="mine")),
    }
    with pytest.raises(
        ConfigError, match=rf"trackers\.{name} needs {name}, which is not installed"
    ):
        builders[name].check()
