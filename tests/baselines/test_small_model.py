"""Small models: what they learn from, and how large they are."""

import pytest

from es_cookbook.baselines import small_model


def test_only_answers_are_learned_from() -> None:
    tokenizer = small_model.build_tokenizer("0123456789,=-+Ċ")
    tokens, labels = small_model.encode(
        tokenizer, ["1,2=3\n", "10,2=8\n"], ["1+2<eos>", "10-2<eos>"]
    )
    assert tokenizer.decode(tokens[1].tolist()) == "10,2=8\n10-2<eos>"
    assert tokenizer.decode(labels[1][labels[1] >= 0].tolist()) == "10-2<eos>"
    assert tokens[0, -2:].tolist() == [small_model.PAD_ID] * 2
    assert labels[0, -2:].tolist() == [small_model.IGNORED] * 2


@pytest.mark.parametrize(("width", "depth", "most"), [(128, 4, 1_000_000), (64, 2, 120_000)])
def test_size_of_a_model_follows_from_width_and_depth(width: int, depth: int, most: int) -> None:
    tokenizer = small_model.build_tokenizer("0123456789+=")
    model = small_model.build_model(tokenizer, 0, width, depth)
    assert 0.7 * most < model.num_parameters() < most
