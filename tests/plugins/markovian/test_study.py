"""The study of thoughts, on tiny runs: what it measures, compares, draws and refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from es_cookbook.__main__ import main as es_cookbook
from es_cookbook.common.cli import run_cli
from es_cookbook.plugins.markovian.measuring import DAMAGES
from es_cookbook.plugins.markovian.study import Config, main
from es_cookbook.plugins.markovian.train_cli import CLIConfig
from es_cookbook.plugins.markovian.train_cli import main as train
from tools.bundled import markovian as warm_start
from tools.small_model import build_model, build_tokenizer, save

SHORT = (
    *("trackers=JsonlTrackerBuilder", "num_generations=1", "eval_every=0"),
    *("dataset.problems_per_generation=2", "dataset.num_train=4", "dataset.num_test=8"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Markovian run, one that is not, and one of gradients."""
    directory = tmp_path_factory.mktemp("markovian")
    for name, options in (("markovian", ()), ("open", ("dataset.markovian=False",))):
        log_path = f"log_path={directory / name}"
        run_cli(train, CLIConfig, (log_path, "optimizer.population_size=4", *SHORT, *options))
    program = ["es-cookbook", "policy_gradient", "recipe=markovian", "attempts=2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [*program, f"log_path={directory / 'gradient'}", *SHORT])
        es_cookbook()
    yield directory


@pytest.mark.slow
def test_a_run_is_studied_against_another_and_read_by_other_models(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other, output = str(runs / "markovian"), str(runs / "open"), tmp_path / "study"
    before = {path: path.stat().st_mtime_ns for path in Path(run).rglob("*")}
    tokenizer, untrained = build_tokenizer(warm_start.CHARACTERS), tmp_path / "untrained"
    save(build_model(tokenizer, 0, width=32, depth=1), tokenizer, untrained)
    scorers = f"scorers={CLIConfig().model_name},{untrained}"
    run_cli(main, Config, (f"log_path={run}", f"against={other}", scorers, f"output={output}"))
    said = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in Path(run).rglob("*")} == before
    assert "this, the other, and the difference" in said and f"written to {output}" in said

    found = json.loads((output / "study.json").read_text())
    assert (found["runs"][run]["markovian"], found["runs"][other]["markovian"]) == (True, False)
    of_run, of_other = found["runs"][run], found["runs"][other]
    for damage in DAMAGES:
        assert of_run[f"fragility/{damage}/0"]["value"] == 0
    above_0 = [f"fragility/{damage}/{share}" for damage in DAMAGES for share in range(20, 101, 20)]
    mean = sum(of_run[metric]["value"] for metric in above_0) / len(above_0)
    assert of_run["fragility"]["value"] == pytest.approx(mean)
    # Nothing is left of the thought, whichever way it went.
    gone = [of_run[f"fragility/{damage}/100"]["value"] for damage in ("delete", "truncate_front")]
    assert gone[0] == gone[1] != 0
    assert of_run["useful"]["value"] > 0.9 > of_run["correct"]["value"]
    assert of_run["written"]["value"] > of_run["unrelated"]["value"] + 1
    gap = found["comparisons"]["fragility"]
    assert gap["difference"] == pytest.approx(
        of_run["fragility"]["value"] - of_other["fragility"]["value"]
    )
    assert gap["low"] <= gap["difference"] <= gap["high"]
    assert of_other["correct"]["value"] > of_run["correct"]["value"], "it sees the question"
    read = found["scorers"][CLIConfig().model_name]["logprob"]["value"]
    assert read == pytest.approx(of_run["logprob"]["value"], abs=0.5), "all but the same model"
    assert found["scorers"][str(untrained)]["logprob"]["value"] < read - 0.5

    lines = [json.loads(line) for line in (output / "thoughts.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert {"problem", "question", "gold", "thought", "answer", "metrics"} == set(lines[0])
    plots = {"accuracy", "fragility", "fragility-against", "scorers"}
    assert {path.stem for path in output.glob("*.png")} == plots
    drawn = (output / "fragility.svg").read_text()
    assert all(f"<!-- {damage} -->" in drawn.replace("_", "_") for damage in DAMAGES)
    with pytest.raises(SystemExit):
        run_cli(main, Config, (f"log_path={run}", f"output={output}"))
    assert "is there already; give another one" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_gradients_is_studied_with_its_last_weights(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (f"log_path={runs / 'gradient'}", f"output={tmp_path / 'study'}", "plots=False")
    run_cli(main, Config, options)
    found = json.loads((tmp_path / "study" / "study.json").read_text())
    last = json.loads((runs / "gradient" / "metrics.jsonl").read_text().splitlines()[-1])
    of_run = found["runs"][str(runs / "gradient")]
    assert of_run["logprob"]["value"] == pytest.approx(last["test/env/all/logprob"], abs=1e-5)
    assert not list((tmp_path / "study").glob("*.png"))
