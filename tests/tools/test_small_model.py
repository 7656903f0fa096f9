"""Small models: what they learn from, how they are trained, and how large they are."""

import itertools
import random
from pathlib import Path
from unittest import mock

import pytest
import torch

from es_cookbook.common.errors import ConfigError
from es_cookbook.plugins.gradients.learner import Learner
from es_cookbook.rl.rollouts import Example
from tools import small_model


def test_only_answers_are_learned_from() -> None:
    tokenizer = small_model.build_tokenizer("0123456789,=-+Ċ")
    first, second = small_model.to_examples(
        tokenizer, [("1,2=3\n", "1+2<eos>"), ("10,2=8\n", "10-2<eos>")]
    )
    assert tokenizer.decode(list(second.tokens_T)) == "10,2=8\n10-2<eos>"
    learned_T = zip(second.tokens_T, second.learned_T, strict=True)
    assert tokenizer.decode([token for token, learned in learned_T if learned]) == "10-2<eos>"
    assert sum(first.learned_T) == 4


def test_they_are_trained_by_the_loop_of_supervised_fine_tuning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And by nothing else: what a step of plain PyTorch comes to, bit for bit."""
    tokenizer = small_model.build_tokenizer("0123456789+=")
    rows = [("1+1=", "2<eos>"), ("12+3=", "15<eos>"), ("9+9=", "1")]
    model, plain = (small_model.build_model(tokenizer, 0, 32, 1) for _ in range(2))
    step, batches = Learner.step, list[list[Example]]()

    def counted(self: Learner, examples: list[Example], *given: object) -> object:
        batches.append(examples)
        return step(self, examples, *given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Learner, "step", counted)
    small_model.fit(model, tokenizer, itertools.repeat(rows), steps=3, learning_rate=0.01)
    assert batches == [small_model.to_examples(tokenizer, rows)] * 3

    matrices = [p for n, p in plain.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in plain.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    texts = [tokenizer.encode(asked + answered) for asked, answered in rows]
    tokens = torch.tensor([text + [0] * (8 - len(text)) for text in texts])
    labels = torch.full_like(tokens, -100)
    labels[0, 4:6], labels[1, 5:8], labels[2, 4:5] = tokens[0, 4:6], tokens[1, 5:8], tokens[2, 4:5]
    for i in range(3):
        logits = plain(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        plain.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer, part in zip(optimizers, (1, 2), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / part * ((i + 1) / 50 * max(1 - i / 3, 0.02))
            optimizer.step()
    weights = plain.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(("width", "depth", "most"), [(128, 4, 1_000_000), (64, 2, 120_000)])
def test_size_of_a_model_follows_from_width_and_depth(width: int, depth: int, most: int) -> None:
    tokenizer = small_model.build_tokenizer("0123456789+=")
    model = small_model.build_model(tokenizer, 0, width, depth)
    assert 0.7 * most < model.num_parameters() < most


def test_weights_are_those_of_the_seed_and_tags_are_tokens() -> None:
    tokenizer = small_model.build_tokenizer("0123456789+=")
    first, again, other = (small_model.build_model(tokenizer, seed, 32, 1) for seed in (0, 0, 1))
    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert first.get_output_embeddings().weight is weights[0]
    assert tokenizer.encode("<pad><eos><answer>7") == [0, 1, *tokenizer.encode("<answer>7")]
    assert len(tokenizer.encode("<answer>7")) == 2
    assert (first.config.pad_token_id, first.config.eos_token_id) == (0, 1)


def test_chances_are_logistic() -> None:
    rng = mock.create_autospec(random.Random, instance=True)
    for leaning, drawn, happens in (
        *((0.0, 0.49, True), (0.0, 0.51, False)),
        *((1.0, 0.731, True), (1.0, 0.732, False)),  # 1 / (1 + 1/e) = 0.7311
        *((-1.0, 0.268, True), (-1.0, 0.269, False)),
    ):
        rng.random.return_value = drawn
        assert small_model.happens(leaning, rng) == happens


def test_the_rate_rises_for_50_steps_and_falls_to_a_fiftieth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, rates = small_model.build_tokenizer("0123456789+="), list[float]()

    def learned(_: object, __: object, rate: float) -> tuple[float, float]:
        rates.append(rate)
        return 0.5, 1.0

    monkeypatch.setattr(small_model, "learn", learned)
    model = small_model.build_model(tokenizer, 0, 32, 1)
    rows = itertools.repeat([("1+1=", "2<eos>")])
    small_model.fit(model, tokenizer, rows, steps=120, learning_rate=1.0)
    assert len(rates) == 120
    found = [rates[step] for step in (0, 24, 49, 59, 119)]
    assert found == pytest.approx([1 / 50, 25 / 50 * 96 / 120, 71 / 120, 61 / 120, 0.02])
    said = [line.split("  ")[:2] for line in capsys.readouterr().out.split("\n")[:-1]]
    assert said == [["step 100/120", "loss 0.500"], ["step 120/120", "loss 0.500"]]


def test_answers_are_those_of_each_question_alone(tmp_path: Path) -> None:
    tokenizer = small_model.build_tokenizer("0123456789+=")
    model = small_model.build_model(tokenizer, 0, 32, 1)
    asked = ["1+1=", "12+3=", "9+9="]
    found = small_model.answer(model, tokenizer, asked, 4)
    alone = [small_model.answer(model, tokenizer, [each], 4)[0] for each in asked]
    assert found == alone and all(len(answers) == 1 for answers in found)
    drawn = small_model.answer(model, tokenizer, asked, 8, samples=3)
    assert all(len(set(answers)) == 3 for answers in drawn)
    small_model.save(model, tokenizer, tmp_path / "model")
    assert {"config.json", "tokenizer.json"} < {p.name for p in (tmp_path / "model").iterdir()}
    assert small_model.new_directory(str(tmp_path / "new")) == tmp_path / "new"
    for wrong in ("model", "none/new"):
        with pytest.raises(ConfigError, match="output must be a new directory in one that exists"):
            small_model.new_directory(str(tmp_path / wrong))
