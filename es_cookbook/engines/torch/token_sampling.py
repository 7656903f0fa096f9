"""From logits to tokens, each row a function of its own logits and uniform number.

Greedy, temperature and top-p.

The uniform number of a token comes from NumPy's Philox generator keyed by (sampling seed, purpose),
at the token's index, so that a sampled token depends on neither the batch nor the device. Tokens
are drawn by inverting the cumulative distribution in vocabulary order: genomes that share a seed
(common random numbers) then make the same choice wherever their distributions agree.
"""

import numpy as np
import torch

from es_cookbook.common.seeds import derive_seed

_PURPOSE_KEY = derive_seed(0, "token uniforms")


def token_uniforms(seed: int, num_tokens: int) -> np.ndarray:
    """One uniform number in [0, 1) for each token index, float64, of a sampling seed."""
    key = np.array([seed, _PURPOSE_KEY], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(num_tokens)
    return (np.asarray(words) >> np.uint64(11)) * 2.0**-53


def choose_tokens(
    logits_N_V: torch.Tensor,
    temperature_N: torch.Tensor,
    top_p_N: torch.Tensor,
    uniform_N: torch.Tensor,
) -> torch.Tensor:
    """Sample one token a row.

    Args:
        logits_N_V: float32 logits.
        temperature_N: 0 is greedy.
        top_p_N: nucleus mass in (0, 1].
        uniform_N: float64 in [0, 1), one a row.

    Returns:
        Token ids (N,), int64.
    """
    tokens_N = logits_N_V.argmax(dim=-1)
    hot = (temperature_N > 0).nonzero().flatten()
    if len(hot) == 0:
        return tokens_N
    scaled = logits_N_V[hot].double() / temperature_N[hot, None]
    mass = torch.softmax(scaled, dim=-1)
    top_p = top_p_N[hot, None]
    if bool((top_p < 1).any()):
        ordered, order = mass.sort(dim=-1, descending=True, stable=True)
        outside = (ordered.cumsum(dim=-1) - ordered >= top_p) & (top_p < 1)
        mass = mass.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), 0.0)
    cumulative = mass.cumsum(dim=-1)
    target = uniform_N[hot, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True).flatten()
    tokens_N[hot] = picked.clamp(max=logits_N_V.shape[-1] - 1)
    return tokens_N


def token_logprobs(logits_N_V: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
    """Log-probability (natural log) of one token a row, before temperature and top-p: (N,)."""
    return torch.log_softmax(logits_N_V, dim=-1).gather(1, tokens_N[:, None]).flatten()
