"""Runs as models of inspect-ai, whose logs it reads back."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from es_cookbook.plugins.inspect import command as inspect
from es_cookbook.rl.messages.chat import ChatOptions
from es_cookbook.rl.messages.message_env import Script
from es_cookbook.rl.messages.thoughts import spoken
from es_cookbook.rl.types import Action, Observation, SamplingParams
from es_cookbook.runs.recorded import open_run, rebuild
from tests.chat_templates import CHATML, tokenizer_with

# One worker for all: importing inspect-ai takes seconds.
pytestmark = pytest.mark.xdist_group("inspect")

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests/data/recorded/low_rank"
TASKS = ROOT / "tests/plugins/inspect/inspect_tasks/sums.py"
TOKENIZER = tokenizer_with(CHATML)
HEAD = """@task
def one():
    return Task(dataset=[Sample(input="1+1", target="2")], scorer=includes())
"""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'


async def evaluated(texts: Sequence[str], task: str, log_dir: Path, context_length: int = 4000):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """The accuracy at a task, of `TASKS` or a path, what the model saw, and the log."""
    from inspect_ai.log import read_eval_log

    from es_cookbook.plugins.inspect.models import Source, run_task

    script = Script(texts, TOKENIZER, context_length)

    async def answer(observation: Observation, params: SamplingParams, seed: int) -> Action:
        return await script.sample(observation, params)

    source = Source(answer, TOKENIZER, context_length, SamplingParams(), ChatOptions())
    path = task if "/" in task else f"{TASKS}@{task}"
    config = inspect.InspectConfig(model_name=".", task=path, log_dir=str(log_dir))
    (found,) = await run_task(config, source, {})
    log = read_eval_log(found.location)
    return log.results and log.results.scores[0].metrics["accuracy"].value, script, log


async def test_a_script_may_be_named_by_its_whole_path(tmp_path: Path) -> None:
    script = tmp_path / "head.py"
    script.write_text(TASKS.read_text().partition("@task")[0] + HEAD)
    accuracy, *_ = await evaluated(["2"], str(script), tmp_path / "logs")
    assert accuracy == 1.0


async def test_a_task_with_a_tool_goes_on_from_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    accuracy, script, log = await evaluated([CALL, "It is 42."], "with_tool", tmp_path)
    first, second = (seen.tokens_T for seen in script.seen)
    assert '"name": "add"' in str(TOKENIZER.decode(first))
    said = TOKENIZER.encode(CALL, add_special_tokens=False)
    assert second[: len(first) + len(said)] == (*first, *said)
    assert "42" in str(TOKENIZER.decode(second[len(first) + len(said) :]))
    (sample,) = log.samples
    assert [m.role for m in sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.messages[1].tool_calls[0].function == "add"
    assert (log.status, accuracy, log.eval.model) == ("success", 1.0, f"es/{Path.cwd().name}")
    assert sample.output.usage.input_tokens == len(second)


async def test_a_call_that_cannot_be_read_is_told_to_the_model(tmp_path: Path) -> None:
    broken = "<tool_call>add(20, 22)</tool_call>"
    accuracy, script, _ = await evaluated([broken, CALL, "42"], "with_tool", tmp_path)
    assert accuracy == 1.0 and "is not JSON" in str(TOKENIZER.decode(script.seen[1].tokens_T))


async def test_a_chat_without_room_for_a_turn_ends(tmp_path: Path) -> None:
    accuracy, script, log = await evaluated(["9"], "head", tmp_path, context_length=8)
    assert script.seen == [] and accuracy == 0.0
    assert {sample.output.stop_reason for sample in log.samples} == {"model_length"}


def call(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["es-cookbook", *options])
    try:
        inspect.cli()
    except SystemExit as ended:
        return int(str(ended.code))
    return 0


@pytest.mark.parametrize("genome", ["centre", "base", "1"])
async def test_a_run_is_evaluated_and_answers_as_it_does_elsewhere(
    genome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import anyio
    from inspect_ai.log import list_eval_logs, read_eval_log

    model = str(ROOT / json.loads((RECORDED / "config.json").read_text())["model_name"])
    options = [f"log_path={RECORDED}", f"model_name={model}", f"log_dir={tmp_path}/logs"]
    options += [f"task={TASKS}@head", f"genome={genome}", "generation=1", "chat.system="]
    code = await anyio.to_thread.run_sync(lambda: call(monkeypatch, *options))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    name = "genome/1" if genome == "1" else genome
    assert f"head, es/{name}, generation 1, 3 samples: includes/accuracy" in printed.out
    (info,) = list_eval_logs(f"{tmp_path}/logs")
    log = read_eval_log(info)
    assert log.eval.model == f"es/{name}"
    assert log.eval.metadata["generation"] == 1
    run = open_run(RECORDED, model)
    rebuilt = await rebuild(run)
    try:
        await rebuilt.go_to(1)
        tokens_T = tuple(rebuilt.engine.tokenizer.encode("Add.\n\n2+2="))
        who = 1 if genome == "1" else genome
        sampling = SamplingParams(max_tokens=run.config.sampling.max_tokens)
        action = await rebuilt.answer(who, Observation(tokens_T), sampling, 0)  # type: ignore[arg-type]
    finally:
        await rebuilt.close()
    assert log.samples[2].output.completion == spoken(action.text)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("task=not_there.py", "there is no script not_there.py"),
        ("task=no_such_evals/sums", "neither a script with one nor registered by an installed"),
        ('task_args={"mots": 2}', "head has no argument 'mots'; did you mean 'most'?"),
        ("task_args=[1]", "task_args must be a JSON object, found [1]"),
        (f"task={TASKS}@multiply", "multiply"),
        (f"task={TASKS}@with_top_k", "sets top_k, which engines do not support"),
        ("genome=1000", "there is no genome 1000"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    option: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(ROOT / json.loads((RECORDED / "config.json").read_text())["model_name"])
    options = {"log_path": RECORDED, "model_name": model, "task": f"{TASKS}@head"}
    options |= {"log_dir": tmp_path / "logs"}
    name, _, value = option.partition("=")
    given = [f"{key}={value}" for key, value in {**options, name: value}.items()]
    assert call(monkeypatch, *given) != 0
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


def test_a_model_without_a_run_is_evaluated_with_a_task_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from inspect_ai._util.entrypoints import clear_entry_points_state

    clear_entry_points_state()  # Asked once a process.
    packages = tmp_path / "site-packages"
    (packages / "their_evals").mkdir(parents=True)
    (packages / "their_evals/__init__.py").write_text(TASKS.read_text())
    installed = packages / "their_evals-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: their-evals\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[inspect_ai]\ntheir_evals = their_evals\n")
    monkeypatch.syspath_prepend(str(packages))
    model = str(ROOT / json.loads((RECORDED / "config.json").read_text())["model_name"])
    options = [f"model_name={model}", f"log_dir={tmp_path}/logs", "chat.system=", "max_tokens=4"]
    task = ["task=their_evals/head", 'task_args={"most": 2}']
    assert call(monkeypatch, *options, *task) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "head, es/model, 2 samples: includes/accuracy" in printed
    assert call(monkeypatch, *options, *task, "genome=1") != 0
    assert "genome= needs a run: give log_path=RUN" in capsys.readouterr().err
    assert call(monkeypatch, *task) != 0
    assert "give log_path=RUN or model_name=MODEL" in capsys.readouterr().err
