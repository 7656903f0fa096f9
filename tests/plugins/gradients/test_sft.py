"""Supervised fine-tuning: what of a row is learned, that it is, packed or not, and going on."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import chz
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import processors

from es_cookbook.checkpoints.models import load_causal_lm, load_tokenizer
from es_cookbook.common.cli import run_cli
from es_cookbook.common.errors import ConfigError, DataError, ModelError, RunDirectoryError
from es_cookbook.common.terminal import as_program
from es_cookbook.engines.torch.engine import TorchEngineBuilder
from es_cookbook.plugins.gradients import sft_run
from es_cookbook.plugins.gradients.learner import Learner
from es_cookbook.plugins.gradients.policy_gradient import PPO, Expert, Group
from es_cookbook.plugins.gradients.sft import learn, likelihood, main
from es_cookbook.plugins.gradients.supervised import Evaluation, SFTConfig, SupervisedRows
from es_cookbook.plugins.hub.background_push import HubPush
from es_cookbook.plugins.trackers.libraries import TensorboardTrackerBuilder
from es_cookbook.recipes.arithmetic.dataset import ArithmeticDatasetBuilder
from es_cookbook.recipes.arithmetic.train_cli import CLIConfig
from es_cookbook.rl.data.task import Task
from es_cookbook.rl.rewards.matching import Exact
from es_cookbook.rl.rollouts import Example
from es_cookbook.rl.types import SamplingParams
from es_cookbook.runs.tracking.trackers import FILES_ALONE, TrackersBuilder
from tests.causal_lms import build
from tests.chat_templates import CHATML, MISTRAL, tokenizer_with
from tests.hub_server import HubServer
from tests.tiny_models import EOS, character_tokenizer
from tools.small_model import EOS_ID
from tools.warm_start import chat_tokenizer


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
        ({"messages": []}, "messages must have at least one"),
        (
            {"messages": [{"role": "robot", "content": "1"}]},
            r"messages\[0\].role is unknown; accepted",
        ),
        ({"messages": [{"role": "user", "content": "1"}]}, "who must speak at least once"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(row: object, said: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError, match=said):
        SupervisedRows(source=source)(chat_tokenizer("0123456789"))


def learned(row: object, template: str, tmp_path: Path, *changed: tuple[str, str]) -> str:
    """What of a row is learned, as text; the template's first text in each pair is changed."""
    tokenizer = tokenizer_with(template)
    for before, after in changed:
        assert before in template
        tokenizer.chat_template = template.replace(before, after)
    source = write(tmp_path / "rows.jsonl", row)
    ((example,), _) = SupervisedRows(source=source)(tokenizer)
    said = zip(example.tokens_T, example.learned_T, strict=True)
    return str(tokenizer.decode([token for token, is_learned in said if is_learned]))


ASKED = {"role": "user", "content": "Weather?"}
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def turn(content: object = "", **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **fields}


CALLED = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (CHATML, [ASKED, turn(None, tool_calls=[CALL])], f"{CALLED}<|im_end|>"),
        (CHATML, [ASKED, turn("So.", tool_calls=[CALL])], f"So.{CALLED}<|im_end|>"),
        (MISTRAL, [ASKED, turn("So.", tool_calls=[CALL])], f" So.\n{CALLED}</s>"),
        (CHATML, [ASKED, turn("1", weight=0), ASKED, turn("2", weight=1)], "2<|im_end|>"),
        (CHATML, [ASKED, turn("2", tool_calls=None, name=None, weight=None)], "2<|im_end|>"),
        (CHATML, [ASKED, turn([{"type": "text", "text": "2"}])], "2<|im_end|>"),
    ],
)
def test_all_that_a_turn_says_is_learned_as_the_template_writes_it(
    template: str, messages: object, text: str, tmp_path: Path
) -> None:
    assert learned({"messages": messages}, template, tmp_path) == text


def test_blanks_before_the_end_of_a_turn_are_learned_with_it(tmp_path: Path) -> None:
    row = {"messages": [ASKED, turn("2"), ASKED, turn("3")]}
    text = learned(row, MISTRAL, tmp_path, ("+ eos_token", "+ ' \\n' + eos_token"))
    assert text == " 2 \n</s> 3 \n</s>"


def test_a_thought_beside_the_answer_is_learned_where_the_template_has_a_place_for_it(
    tmp_path: Path,
) -> None:
    row = {"messages": [ASKED, turn("2", reasoning_content="1 + 1")]}
    content = "{{ message.content }}\n{%- for"
    thought = "{% if message.thinking %}<think>{{ message.thinking }}</think>{% endif %}"
    text = learned(row, CHATML, tmp_path, (content, f"{thought}{content}"))
    assert text == "<think>1 + 1</think>2<|im_end|>"
    with pytest.raises(DataError, match=r"line 1: .* leaves out what is thought \(reasoning_cont"):
        learned(row, CHATML, tmp_path)


def test_tools_of_a_row_are_in_its_prompt(tmp_path: Path) -> None:
    row = {"tools": [TOOL], "messages": [ASKED, turn("2")]}
    for template in (CHATML, MISTRAL):
        tokenizer = tokenizer_with(template)
        ((example,), _) = SupervisedRows(source=write(tmp_path / "rows.jsonl", row))(tokenizer)
        assert '"name": "look"' in str(tokenizer.decode(list(example.tokens_T)))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [ASKED, turn()]}, r"messages\[1\] of the assistant says nothing"),
        ({"messages": [ASKED, turn("x", weight=0.5)]}, r"messages\[1\].weight must be 0 or 1"),
        ({"messages": [ASKED, turn("x", prefix=True)]}, r"messages\[1\].prefix is not read"),
        ({"messages": [{**ASKED, "name": "Ann"}, turn("x")]}, r"messages\[0\].name is not read"),
        ({"messages": [ASKED, turn("x<|im_end|>y")]}, "has the end of a turn in it, '<|im_end|>'"),
        (
            {"messages": [ASKED, turn("x")], "tools": ["look"]},
            r"tools\[0\] must be an object, and is a",
        ),
        ({"prompt": "1", "completion": "2<|im_end|>3"}, "has the end of a turn in it"),
    ],
)
def test_what_a_message_says_in_vain_is_refused(row: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl, line 1: .*{said}"):
        learned(row, CHATML, tmp_path)


def test_rows_that_cannot_be_learned_are_skipped_if_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = {"messages": [ASKED, turn("2")]}
    bad = [{"messages": [ASKED, turn()]}, {"messages": [ASKED, turn("x", prefix=True)]}]
    bad.append({"messages": [ASKED, turn("x<|im_end|>y")]})
    source = write(tmp_path / "rows.jsonl", good, *bad, good)
    rows = SupervisedRows(source=source, on_bad_row="skip", num_test=1)
    with as_program():
        rows.check()
        train, test = rows(tokenizer_with(CHATML))
    assert (len(train), len(test)) == (1, 1)
    assert "of 5 rows, 3 unusable and skipped (line 2" in capfd.readouterr().err
    with pytest.raises(DataError, match="0 rows can be used"):
        SupervisedRows(source=write(tmp_path / "bad.jsonl", *bad), on_bad_row="skip")(
            tokenizer_with(CHATML)
        )


def test_a_prompt_begins_once_and_ends_as_it_is_given(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(CHATML)
    around = processors.TemplateProcessing(
        single=["<bos>", "$A", "<|im_end|>"],
        special_tokens=[
            (name, tokenizer.convert_tokens_to_ids(name)) for name in ("<bos>", "<|im_end|>")
        ],
    )
    tokenizer.backend_tokenizer.post_processor = around
    rows = [
        {"prompt": f"{begin}2+2=", "completion": f"4{end}"}
        for begin, end in (("", ""), ("<bos>", "<|im_end|>"))
    ]
    examples, _ = SupervisedRows(source=write(tmp_path / "rows.jsonl", *rows))(tokenizer)
    for example in examples:
        assert tokenizer.decode(list(example.tokens_T)) == "<bos>2+2=4<|im_end|>"


def test_an_end_that_is_written_is_learned_once_and_nothing_behind_it(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer("0123456789")
    said = ["3<eos>", "345<eos>", "345"]
    rows = [{"prompt": "12", "completion": text} for text in said]
    examples, _ = SupervisedRows(source=write(tmp_path / "rows.jsonl", *rows))(tokenizer)
    texts = [tokenizer.decode(list(example.tokens_T)) for example in examples]
    assert texts == ["123<eos>", "12345<eos>", "12345<eos>"]
    twice = write(tmp_path / "twice.jsonl", {"prompt": "12", "completion": "3<eos><eos>"})
    with pytest.raises(DataError, match="has the end of a turn in it, '<eos>'"):
        SupervisedRows(source=twice)(tokenizer)


def test_chats_that_have_no_system_message_get_the_one_that_is_given(tmp_path: Path) -> None:
    def chat(*messages: tuple[str, str]) -> dict[str, object]:
        return {"messages": [{"role": role, "content": text} for role, text in messages]}

    asked, answered = ("user", "2+2="), ("assistant", "4")
    rows = [chat(asked, answered), chat(("system", "Think."), asked, answered)]
    rows.append(chat(asked, ("system", "Think."), answered))
    source, tokenizer = write(tmp_path / "rows.jsonl", *rows), tokenizer_with(CHATML)

    def texts(system: str) -> list[str]:
        examples, _ = SupervisedRows(source=source, system=system)(tokenizer)
        return [tokenizer.decode(list(example.tokens_T)) for example in examples]

    with_it, without = texts("Be brief."), texts("")
    assert ["Be brief." in text for text in with_it] == [True, False, True]
    assert with_it[1] == without[1]
    twice = write(tmp_path / "twice.jsonl", chat(asked, answered, answered))
    with pytest.raises(DataError, match="never twice in a row"):
        SupervisedRows(source=twice)(tokenizer)


def test_rows_are_looked_at_before_a_model_is_loaded(tmp_path: Path) -> None:
    good = {"prompt": "1", "completion": "2"}
    SupervisedRows(source=write(tmp_path / "good.jsonl", good)).check()
    for name, rows, num_test, said in (
        ("few", [good], 1, "1 row can be used and dataset.num_test is 1"),
        ("lacks", [good, {"prompt": "1"}], 0, "field 'completion' is missing"),
        ("roles", [good, {"messages": [{"role": "robot", "content": "1"}]}], 0, "role is unknown"),
    ):
        source = write(tmp_path / f"{name}.jsonl", *rows)
        with pytest.raises(DataError, match=said):
            SupervisedRows(source=source, num_test=num_test).check()
    with pytest.raises(DataError, match="there is no such file"):
        SupervisedRows(source=str(tmp_path / "no.jsonl")).check()


def test_the_loss_is_the_mean_over_the_tokens_that_have_one() -> None:
    shares: list[float] = []

    class Stepping:
        def step(self, _: object, __: object, ___: float, share: float) -> tuple[float, float]:
            shares.append(share)
            return -0.5, 2.0

    # The first of all tokens follows from nothing, and never has a loss.
    texts = [Example((1, 2, 3), (True, True, True)), Example((1, 2), (True, False))]
    assert learn(cast(Learner, Stepping()), texts, 0.1) == (0.5, 2.0)
    learn(cast(Learner, Stepping()), [Example((1, 2), (False, True))], 0.1)
    assert shares == [1 / 2, 1.0]


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
    rates: list[float] = []

    def four_steps(self: Learner, *given: object) -> object:
        if len(rates) == 4:
            raise KeyboardInterrupt
        rates.append(given[2])  # pyright: ignore[reportArgumentType]
        return step(self, *given)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", four_steps)
        with pytest.raises(KeyboardInterrupt):
            main(interrupted)
    falling = [1, 0.875, 0.75, 0.625]  # Of eight steps, linearly.
    assert rates == pytest.approx([interrupted.learning_rate * factor for factor in falling])
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


@pytest.mark.slow
def test_checkpoints_are_tracked_and_pushed(
    tiny_model: Callable[[str], Path],
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tensorboard")
    model, output = tiny_model("qwen2"), tmp_path / "out"
    push = HubPush(repo_id="me/tuned", every=1)
    tensorboard = TensorboardTrackerBuilder()
    trackers = TrackersBuilder(**FILES_ALONE, tensorboard=tensorboard, hub=push)
    with HubServer() as hub:
        hub.lead_here(monkeypatch)
        main(config(model, rows, output, trackers=trackers))
        names = {f"main-step-{step:09d}" for step in (3, 6, 8)}
        assert set(hub.repositories["me/tuned"].branches) <= {"main", *names}
        pushed = hub.files("me/tuned", "main-step-000000008")
    assert pushed["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert "tokenizer.json" in pushed
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
    main(config(CLIConfig().model_name, rows, tmp_path / "out", max_length=16, **changes))
    assert losses(tmp_path / "out")[-1] < losses(tmp_path / "out")[0] - 0.3
    rewards = losses(tmp_path / "out", "test/reward/mean")
    assert len(rewards) == 2 and rewards[0] != rewards[1]
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    merged = sft_run.merged_weights(adapted)
    assert {name.split(".")[-2] for name in merged} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    plain = dict(adapted.merge_and_unload().named_parameters())
    assert all(torch.allclose(plain[name], weight) for name, weight in merged.items())


def test_problems_of_the_evaluation_are_checked_before_the_first_step(
    tiny_model: Callable[[str], Path], rows: str, tmp_path: Path
) -> None:
    """A tokenizer of characters up to "Q" cannot say this answer."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"question": "{each}", "answer": "x"}}\n' for each in "AB"))
    evaluation = Evaluation(
        dataset=Task(
            source=str(problems),
            num_test=1,
            problems_per_generation=1,
            reward=Exact(),
        ),
        engine=TorchEngineBuilder(device="cpu", num_lanes=1),
    )
    with pytest.raises(DataError, match=r"problems.jsonl, line .: the model cannot say its own"):
        main(config(tiny_model("qwen2"), rows, tmp_path / "out", rank=0, evaluation=evaluation))


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


def test_numbers_that_no_table_of_options_shows(rows: str) -> None:
    """The pages have tables of other options, which would show another default."""
    sft = SFTConfig(model_name="m", dataset=SupervisedRows(source=rows), output="o")
    assert (sft.rank, sft.alpha, sft.learning_rate, sft.max_gradient_norm) == (8, 16, 2e-4, 1.0)
    assert (sft.batch_size, sft.epochs, sft.max_length) == (32, 1.0, 1024)
    assert (sft.log_every, sft.checkpoint_every, sft.seed) == (10, 100, 0)
    assert not sft.packing and not sft.dataset.chat and sft.dataset.num_test == 0
    evaluation = Evaluation(dataset=ArithmeticDatasetBuilder())
    assert (evaluation.every, evaluation.attempts, evaluation.temperature) == (0, 1, 0.0)
    assert (PPO().epochs, PPO().steps, PPO().clip, PPO().reading) == (4, 1, 0.2, 1.0)
    assert (Group().epochs, Group().normalise, Expert().keep) == (1, True, "right")


def test_bad_input(
    tiny_model: Callable[[str], Path],
    rows: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = config(tiny_model("qwen2"), rows, tmp_path / "out")
    with pytest.raises(ConfigError, match="num_test must be 0 or more"):
        SupervisedRows(source=rows, num_test=-1)
    problems = ArithmeticDatasetBuilder()
    with pytest.raises(ConfigError, match=r"evaluation\.every must be 0 or more"):
        Evaluation(dataset=problems, every=-1)
    with pytest.raises(ConfigError, match=r"evaluation\.attempts=2 would all be alike"):
        Evaluation(dataset=problems, attempts=2)
    for field, value in (
        *(("rank", -1), ("learning_rate", 0.0), ("epochs", float("nan")), ("alpha", 0)),
        *(("batch_size", 0), ("log_every", 0), ("max_length", 1), ("checkpoint_every", -1)),
    ):
        with pytest.raises(ConfigError, match=f"{field} must be"):
            chz.replace(good, **{field: value})
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
