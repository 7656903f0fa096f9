"""Small models: what they learn from, how they are trained, and how large they are."""

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
