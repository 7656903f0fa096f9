"""Supervised fine-tuning: what of a row is learned, that it is, packed or not, and going on."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import chz
import pytest
import torch
from safetensors.torch import load_file

from es_cookbook.baselines import sft_run
from es_cookbook.baselines.learner import Learner
from es_cookbook.baselines.sft import likelihood, main
from es_cookbook.baselines.small_model import EOS_ID
from es_cookbook.baselines.supervised import Evaluation, SFTConfig, SupervisedRows
from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError, ModelError, RunDirectoryError
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.recipes.arithmetic.dataset import ArithmeticDatasetBuilder
from es_cookbook.recipes.arithmetic.train_cli import RECIPE
from es_cookbook.recipes.warm_start import chat_tokenizer
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.types import SamplingParams
from es_cookbook.runs.hub.background_push import CheckpointPush
from es_cookbook.runs.tracking.libraries import TensorboardTrackerBuilder
from es_cookbook.runs.tracking.standard import StandardTrackersBuilder
from tests.causal_lms import build
from tests.hub_server import HubServer
from tests.tiny_models import EOS, character_tokenizer


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """One in three digits is doubled."""
    pairs = [{"prompt": f"{i}{i}/", "completion": f"{i}" * (1 + i % 3)} for i in range(10)]
    return write(tmp_path / "rows.jsonl", *pairs, *pairs)


def config(model: Path, rows: str, output: Path, **changes: object) -> SFTConfig:
    fields = {
        "model_name": str(model),
        "dataset": SupervisedRows(source=rows, num_test=4),
        "output": str(output),
        "rank": 0,
        "learning_rate": 0.01,
        "batch_size": 4,
        "epochs": 2.0,
        "log_every": 1,
        "checkpoint_every": 3,
    }
    return SFTConfig(**fields | changes)


def losses(output: Path, key: str = "loss/train") -> list[float]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


# --- rows ----------------------------------------------------------------------------------------


def test_the_completion_and_the_end_are_learned_and_the_prompt_is_not(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", {"prompt": "12", "completion": "345"})
    tokenizer = character_tokenizer()
    ((example,), _) = SupervisedRows(source=source)(tokenizer)
    assert example.tokens_T == (*tokenizer.encode("12345"), EOS)
    assert example.learned_T == (False, False, True, True, True, True)


def test_of_a_chat_the_assistants_turns_are_learned(tmp_path: Path) -> None:
    chat = [("user", "1"), ("assistant", "23"), ("user", "4"), ("assistant", "5")]
    messages = [{"role": role, "content": text} for role, text in chat]
    source = write(
        tmp_path / "rows.jsonl", {"messages": messages}, {"prompt": "1", "completion": "23"}
    )
    tokenizer = chat_tokenizer("0123456789")
    (whole, single), _ = SupervisedRows(source=source, chat=True)(tokenizer)
    one, two, three, four, five = (tokenizer.encode(digit)[0] for digit in "12345")
    assert whole.tokens_T == (one, two, three, EOS_ID, four, five, EOS_ID)
    assert whole.learned_T == (False, True, True, True, False, True, True)
    assert (single.tokens_T, single.learned_T) == (whole.tokens_T[:4], whole.learned_T[:4])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1"}, r"rows\.jsonl, line 1: field 'completion' is missing"),
        ({"messages": []}, "'messages' must be a list of messages"),
        ({"messages": [{"role": "robot", "content": "1"}]}, r"messages\[0\] must have a role"),
        ({"messages": [{"role": "user", "content": "1"}]}, "who must speak at least once"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(row: object, said: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError, match=said):
        SupervisedRows(source=source)(chat_tokenizer("0123456789"))


# --- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt_neox"])
def test_packed_rows_see_nothing_of_each_other(
    family: str, tiny_model: Callable[[str], Path]
) -> None:
    texts = [(5, 6, 7, 8), (9, 8, 7), (4, 9, 4, 4, 5, 5, 8, 8, 8, 7, 5, 6), (30, 31)]
    examples = [Example(text, (True,) * len(text)) for text in texts]
    found: list[list[tuple[float, ...]]] = []
    for length in (0, 13):
        model = load_causal_lm(str(tiny_model(family)), "float32", torch.device("cpu"))
        names = [name for name, _ in model.named_parameters()]
        learner = Learner(model, names, tokens_per_pass=64, packed_length=length)
        learner.step(examples, likelihood, 0.01, 0.1)
        found.append(learner.logprobs(examples))
    for alone_T, packed_T in zip(*found, strict=True):
        assert packed_T == pytest.approx(alone_T, abs=1e-3)


@pytest.mark.parametrize("family", ["BloomForCausalLM", "MambaForCausalLM"])
def test_a_model_whose_rows_would_see_each_other_is_not_packed(
    family: str, rows: str, tmp_path: Path
) -> None:
    """Its positions are distances, or it has none."""
    model = build(family)
    assert not Learner(model, (), packed_length=16).packs
    model.save_pretrained(tmp_path / "model")
    chat_tokenizer("0123456789").save_pretrained(tmp_path / "model")
    packing = config(tmp_path / "model", rows, tmp_path / "out", packing=True)
    with pytest.raises(ConfigError, match=f"packing: in a {family} the rows of one sequence would"):
        main(packing)


def test_a_tokenizer_needs_no_padding_token(
    tiny_model: Callable[[str], Path], rows: str, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model("qwen2"), tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(model)
    assert load_tokenizer(str(model)).pad_token_id is None
    main(config(model, rows, tmp_path / "out"))
    without = losses(tmp_path / "out")
    main(config(tiny_model("qwen2"), rows, tmp_path / "with"))
    assert without == losses(tmp_path / "with")


@pytest.mark.parametrize(
    ("how", "written"),
    [
        ({}, "model.safetensors"),
        ({"rank": 4, "learning_rate": 0.05}, "adapter_model.safetensors"),
    ],
)
def test_it_learns_and_goes_on_where_it_was_interrupted(
    how: dict[str, object],
    written: str,
    tiny_model: Callable[[str], Path],
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "rank" in how:
        pytest.importorskip(
            "peft", reason="PEFT is not installed: pip install 'es-cookbook[baselines]'"
        )
    model = tiny_model("qwen2")
    main(config(model, rows, tmp_path / "whole", **how))
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.5
    first, last = losses(tmp_path / "whole", "loss/test")
    assert last < first - 0.5

    interrupted = config(model, rows, tmp_path / "resumed", **how)
    step = Learner.step
    steps: list[int] = []

    def four_steps(self: Learner, *given: object) -> object:
        if len(steps) == 4:
            raise KeyboardInterrupt
        steps.append(len(steps))
        return step(self, *given)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", four_steps)
        with pytest.raises(KeyboardInterrupt):
            main(interrupted)
    assert not (tmp_path / "resumed").exists()
    kept = tmp_path / "resumed.training"
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["3"]
    with pytest.raises(RunDirectoryError, match=r"batch_size was 4, is 2"):
        main(chz.replace(interrupted, batch_size=2))
    main(interrupted)
    weights, others = (load_file(tmp_path / name / written) for name in ("whole", "resumed"))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert not kept.exists()
    with pytest.raises(ConfigError, match="is there already"):
        main(interrupted)


@pytest.mark.usefixtures("quick_python")
@pytest.mark.slow
def test_checkpoints_are_tracked_pushed_and_measured(
    tiny_model: Callable[[str], Path],
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("tensorboard")
    model, output = tiny_model("qwen2"), tmp_path / "out"
    options = ("recipe=arithmetic", "dataset.num_test=2", "sampling.max_tokens=2")
    push = CheckpointPush(repo_id="me/tuned", evaluate=options)
    trackers = StandardTrackersBuilder(live=None, tensorboard=TensorboardTrackerBuilder())
    with HubServer() as hub:
        hub.lead_here(monkeypatch)
        main(config(model, rows, output, hub=push, trackers=trackers))
        names = {f"main-step-{step:09d}" for step in (3, 6, 8)}
        assert set(hub.repositories["me/tuned"].branches) <= {"main", *names}
        pushed = hub.files("me/tuned", "main-step-000000008")
    assert pushed["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert "tokenizer.json" in pushed
    assert json.loads((output / "pushed/main-step-000000008.json").read_bytes())["metrics"]
    assert list((output / "tensorboard").iterdir())
    assert not (tmp_path / "out.training").exists()


def test_an_adapter_learns_and_is_what_the_evaluation_measures(rows: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "peft", reason="PEFT is not installed: pip install 'es-cookbook[baselines]'"
    )
    from peft import AutoPeftModelForCausalLM

    evaluation = Evaluation(
        dataset=ArithmeticDatasetBuilder(num_train=8, num_test=8, problems_per_generation=8),
        sampling=SamplingParams(max_tokens=4),
        engine=TorchEngineBuilder(device="cpu", num_lanes=1),
    )
    changes = {"rank": 4, "learning_rate": 0.05, "evaluation": evaluation, "packing": True}
    main(config(RECIPE.model, rows, tmp_path / "out", max_length=16, **changes))
    assert losses(tmp_path / "out")[-1] < losses(tmp_path / "out")[0] - 0.3
    rewards = losses(tmp_path / "out", "test/reward/mean")
    assert len(rewards) == 2 and rewards[0] != rewards[1]
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    merged = sft_run.merged_weights(adapted)
    assert {name.split(".")[-2] for name in merged} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    plain = dict(adapted.merge_and_unload().named_parameters())
    assert all(torch.allclose(plain[name], weight) for name, weight in merged.items())


def test_peft_has_to_be_installed_for_an_adapter_alone(
    tiny_model: Callable[[str], Path],
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"LoRA\) needs peft, .* 'es-cookbook\[baselines\]'"):
        main(config(tiny_model("qwen2"), rows, tmp_path / "out", rank=4))
    main(config(tiny_model("qwen2"), rows, tmp_path / "out", rank=0))


def test_bad_input(
    tiny_model: Callable[[str], Path],
    rows: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = config(tiny_model("qwen2"), rows, tmp_path / "out")
    for field, value in (("rank", -1), ("learning_rate", 0.0), ("epochs", float("nan"))):
        with pytest.raises(ConfigError, match=f"{field} must be"):
            chz.replace(good, **{field: value})
    with pytest.raises(ConfigError, match=r"hub\.evaluate measures whole models"):
        chz.replace(good, rank=4, hub=CheckpointPush(repo_id="me/x", evaluate=("attempts=2",)))
    with pytest.raises(DataError, match="none is left to learn from"):
        main(chz.replace(good, dataset=SupervisedRows(source=rows, num_test=20)))
    with pytest.raises(DataError, match="max_length=2 leaves nothing to learn"):
        main(chz.replace(good, max_length=2))
    with pytest.raises(DataError, match="there is no such file"):
        main(chz.replace(good, dataset=SupervisedRows(source=str(tmp_path / "no.jsonl"))))
    with pytest.raises(ModelError, match="has no chat template"):
        main(chz.replace(good, dataset=SupervisedRows(source=rows, chat=True)))
    # A problem set of no class at all was built for the evaluation that nobody asked for.
    typed = ["dataset.source=x", "model_name=x", "output=x"]
    run_cli(lambda made: print(made.evaluation), SFTConfig, typed)
    assert capsys.readouterr().out == "None\n"
    shutil.rmtree(tmp_path / "out.training", ignore_errors=True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        run_cli(main, SFTConfig, ["dataset.sorce=x"])
    assert "did you mean" in capsys.readouterr().err
