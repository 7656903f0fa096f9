"""Small models: what they learn from, how they are trained, and how large they are."""

import itertools

import pytest
import torch

from es_cookbook.baselines import small_model
from es_cookbook.baselines.learner import Learner
from es_cookbook.rl.rollouts import Example


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
