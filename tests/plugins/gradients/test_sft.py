"""Supervised fine-tuning: what of a row is learned, and that it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import processors

from es_cookbook.checkpoints.model_files import model_directory
from es_cookbook.checkpoints.models import load_causal_lm
from es_cookbook.common.errors import ConfigError, DataError
from es_cookbook.plugins.gradients.learner import Learner
from es_cookbook.plugins.gradients.sft import SFTConfig, learn, main, surprise
from es_cookbook.plugins.gradients.supervised import SupervisedRows
from es_cookbook.rl.rollouts import Example
from tests.chat_templates import CHATML, MISTRAL, tokenizer_with
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


def turn(content: object = "", **fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **fields}


CALLED = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (CHATML, [ASKED, turn(None, tool_calls=[CALL])], f"{CALLED}<|im_end|>"),
        (CHATML, [ASKED, turn("So.", tool_calls=[CALL])], f"So.{CALLED}<|im_end|>"),
        (MISTRAL, [ASKED, turn("So.", tool_calls=[CALL])], f" So.\n{CALLED}</s>"),
        (CHATML, [ASKED, turn("2", tool_calls=None, name=None)], "2<|im_end|>"),
        (CHATML, [ASKED, turn([{"type": "text", "text": "2"}])], "2<|im_end|>"),
    ],
)
def test_all_that_a_turn_says_is_learned_as_the_template_writes_it(
    template: str, messages: object, text: str, tmp_path: Path
) -> None:
    assert learned({"messages": messages}, template, tmp_path) == text


def test_blanks_that_a_template_has_before_the_end_of_a_turn_are_learned(tmp_path: Path) -> None:
    row = {"messages": [ASKED, turn("2"), ASKED, turn("3")]}
    changed = "+ eos_token", "+ ' \\n' + eos_token"
    assert learned(row, MISTRAL, tmp_path, changed) == " 2 \n</s> 3 \n</s>"
    tokenizer = tokenizer_with(MISTRAL)
    tokenizer.chat_template = MISTRAL.replace(*changed)
    ((example,), _) = SupervisedRows(source=str(tmp_path / "rows.jsonl"))(tokenizer)
    assert str(tokenizer.decode(list(example.tokens_T))).count(" \n</s>") == 2, "once each"


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


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "1"}, "field 'completion' is missing"),
        ({"messages": [ASKED]}, "who must speak at least once"),
        ({"messages": [ASKED, turn("1"), turn("2")]}, "never twice in a row"),
        ({"messages": [ASKED, turn()]}, r"messages\[1\] of the assistant says nothing"),
        ({"messages": [ASKED, turn("x", weight=0)]}, r"messages\[1\].weight is not read"),
        ({"messages": [ASKED, turn("x<|im_end|>y")]}, "has the end of a turn in it, '<|im_end|>'"),
        (
            {"messages": [ASKED, turn("x")], "tools": ["look"]},
            r"tools\[0\] must be an object, and is a",
        ),
        ({"prompt": "1", "completion": "2<|im_end|>3"}, "has the end of a turn in it"),
    ],
)
def test_rows_that_cannot_be_learned_are_refused(row: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl, line 1: .*{said}"):
        learned(row, CHATML, tmp_path)


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


# --- learning ------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_tokens_that_have_one(tiny_model: Callable[[str], Path]) -> None:
    model = load_causal_lm(str(tiny_model("qwen2")), "float32", torch.device("cpu"))
    learner = Learner(model, ["model.norm.weight"])
    # The first token follows from nothing and has no loss.
    examples = [Example((1, 2, 3), (True, True, True)), Example((1, 2), (True, False))]
    expected = surprise(learner, examples)
    assert learn(learner, examples, 0.0)[0] == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(-sum(learner.logprobs(examples)[0]) / 2)


def test_the_learning_rate_falls_and_an_interruption_leaves_no_output(
    tiny_model: Callable[[str], Path], rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    def step(self: Learner, _: object, __: object, rate: float, ___: float) -> tuple[float, float]:
        if len(rates) == 4:
            raise KeyboardInterrupt
        rates.append(rate)
        return 0.0, 0.0

    monkeypatch.setattr(Learner, "step", step)
    with pytest.raises(KeyboardInterrupt):
        main(config(tiny_model("qwen2"), rows, tmp_path / "out", learning_rate=0.08))
    assert rates == pytest.approx([0.08, 0.07, 0.06, 0.05]), "of eight steps, linearly"
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("rank", [0, 4])
def test_it_learns_and_writes_what_it_learned(
    rank: int, tiny_model: Callable[[str], Path], rows: str, tmp_path: Path
) -> None:
    if rank:
        pytest.importorskip(
            "peft", reason="PEFT is not installed: pip install 'es-cookbook[baselines]'"
        )
    output = tmp_path / "out"
    sft = config(tiny_model("qwen2"), rows, output, rank=rank, learning_rate=0.05 if rank else 0.01)
    main(sft)
    assert losses(output)[-1] < losses(output)[0] - 0.5
    first, last = losses(output, "loss/test")
    assert last < first - 0.5
    name = "adapter_model.safetensors" if rank else "model.safetensors"
    with pytest.raises(ConfigError, match="is there already"):
        main(sft)
    main(chz.replace(sft, output=str(tmp_path / "again")))
    weights, others = (load_file(path / name) for path in (output, tmp_path / "again"))
    assert all(torch.equal(weights[each], others[each]) for each in weights)
    if rank == 0:
        assert model_directory(str(output)) == output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_test": 20}, "none is left to learn from"),
        ({"max_length": 2}, "max_length=2 leaves nothing to learn"),
        ({"chat": True}, "has no chat template"),
        ({"rank": 4, "targets": ("mlp",)}, "has no linear layer 'mlp'"),
        ({"learning_rate": 1e29}, "training has diverged"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    changes: dict[str, Any], said: str, tiny_model: Callable[[str], Path], rows: str, tmp_path: Path
) -> None:
    of_rows = {name: changes.pop(name) for name in ("num_test", "chat") if name in changes}
    data = {"dataset": SupervisedRows(source=rows, **of_rows)}
    with pytest.raises(ValueError, match=said):
        main(config(tiny_model("qwen2"), rows, tmp_path / "out", **data, **changes))
    assert not (tmp_path / "out").exists()
