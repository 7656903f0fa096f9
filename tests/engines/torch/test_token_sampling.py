"""A token is a function of its row's logits, its request's options and one uniform number."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from es_cookbook.engines.torch.forward.slots import choose_tokens, token_logprobs, token_uniforms


def _choose(
    logits: list[list[float]], temperature: float, top_p: float, uniform: list[float]
) -> list[int]:
    rows = len(logits)
    return choose_tokens(
        torch.tensor(logits),
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.tensor(uniform, dtype=torch.float64),
    ).tolist()


def test_uniform_numbers_are_a_function_of_seed_and_index() -> None:
    long, short = token_uniforms(2**63 - 1, 1000), token_uniforms(2**63 - 1, 7)
    assert np.array_equal(long[:7], short)
    assert not np.intersect1d(long, token_uniforms(1, 1000)).size
    assert long.min() >= 0 and long.max() < 1
    assert abs(long.mean() - 0.5) < 4 / np.sqrt(12 * 1000)


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert _choose([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]], 0.0, 0.1, [0.9, 0.9]) == [1, 0]


def test_a_hot_row_inverts_the_cumulative_distribution_in_vocabulary_order() -> None:
    logits = np.log([0.5, 0.25, 0.25]).tolist()
    uniform = [0.0, 0.49, 0.51, 0.74, 0.76, 0.999999]
    assert _choose([logits] * 6, 1.0, 1.0, uniform) == [0, 0, 1, 1, 2, 2]


def test_temperature_flattens_the_distribution() -> None:
    logits = np.log([0.8, 0.2]).tolist()  # at temperature 2: 2/3 and 1/3
    assert _choose([logits] * 2, 2.0, 1.0, [0.66, 0.67]) == [0, 1]


def test_top_p_keeps_tokens_until_their_mass_reaches_it() -> None:
    logits = np.log([0.1, 0.5, 0.15, 0.25]).tolist()
    assert set(_choose([logits] * 50, 1.0, 0.74, np.linspace(0, 0.99, 50).tolist())) == {1, 3}
    assert set(_choose([logits] * 50, 1.0, 0.76, np.linspace(0, 0.99, 50).tolist())) == {1, 2, 3}
    assert set(_choose([logits] * 50, 1.0, 1e-9, np.linspace(0, 0.99, 50).tolist())) == {1}


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.3, 1.0]), st.floats(0, 0.99)
        ),
        min_size=2,
        max_size=6,
    ),
)
def test_rows_do_not_see_each_others_options(
    logits: list[float], options: list[tuple[float, float, float]]
) -> None:
    together = choose_tokens(
        torch.tensor([logits] * len(options)),
        *(torch.tensor(column, dtype=torch.float64) for column in zip(*options, strict=True)),
    )
    alone = [_choose([logits], t, p, [u])[0] for t, p, u in options]
    assert together.tolist() == alone


def test_logprobs_are_natural_logs_before_any_temperature() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]]).log() + 3
    logprobs = token_logprobs(logits, torch.tensor([2, 1]))
    torch.testing.assert_close(logprobs, torch.tensor([0.7, 0.25]).log())
