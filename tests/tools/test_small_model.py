"""Small models: what they learn from, how they are trained, and how large they are."""

from pathlib import Path

import pytest
import torch

from es_cookbook.common.errors import ConfigError
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


def test_weights_are_those_of_the_seed_and_tags_are_tokens() -> None:
    tokenizer = small_model.build_tokenizer("0123456789+=")
    first, again, other = (small_model.build_model(tokenizer, seed, 32, 1) for seed in (0, 0, 1))
    weights = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert first.get_output_embeddings().weight is weights[0]
    assert tokenizer.encode("<pad><eos><answer>7") == [0, 1, *tokenizer.encode("<answer>7")]
    assert len(tokenizer.encode("<answer>7")) == 2
    assert (first.config.pad_token_id, first.config.eos_token_id) == (0, 1)


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
