"""Presets of zeroth-order methods: settings of MeZO, FZOO, LOZO and QZO, and what they mean here.

MeZO (Malladi et al. 2023, arXiv:2305.17333) estimates the derivative of a loss L along one random
direction z from two forward passes, and steps along it:

    d = (L(θ + ε z) - L(θ - ε z)) / 2ε,    θ <- θ - η d z

That is ES with a population of one mirrored pair, σ = ε and fitness that is not standardised. With
f = -L, the mean log-probability of a gold answer (`surrogate=gold`), the step here is
α/2 · (f₊ - f₋) z, so α = η/ε.

LOZO (Chen et al. 2024, arXiv:2410.07698) has z = U Vᵀ of rank r and divides the step by r. Noise
here has unit variance, U Vᵀ / √r, so σ = ε √r and α = η / (ε √r).

QZO (Shang et al. 2025, arXiv:2505.13430) moves the scales of a quantised model and clips d to
[-C, C]. A pair's raw fitness is ± (f₊ - f₋)/2 = ∓ ε d, so it is clipped to ε C.

FZOO (Dang et al. 2025, arXiv:2506.09034) is in `fzoo.py`: α = η there.

Settings are those of the authors' repositories for OPT-13B (QZO: OPT-6.7B); losses there are means
over the tokens of an answer, and here sums.
"""

import math

from es_cookbook.runs.presets import PLAIN, Preset

_ON_LOSSES = {
    **PLAIN,
    "surrogate": "gold",
    "fitness": "raw",
    "dataset.problems_per_generation": "16",
}
_EPSILON, _ETA = 1e-3, 1e-7
_MEZO = {
    **_ON_LOSSES,
    "search_space": "full_rank",
    "optimizer.antithetic": "True",
    "optimizer.population_size": "2",
    "optimizer.sigma": f"{_EPSILON:g}",
    "optimizer.learning_rate": f"{_ETA / _EPSILON:g}",
}


def mezo() -> Preset:
    """Return the settings for two points along one direction (MeZO)."""
    return Preset(_MEZO, "arXiv:2305.17333")


def fzoo() -> Preset:
    """Return settings for one-sided perturbations, with steps by the spread of losses (FZOO)."""
    options = {
        **_ON_LOSSES,
        "search_space": "full_rank",
        "search_space.noise": "rademacher",
        "optimizer": "fzoo",
        "optimizer.population_size": "8",
        "optimizer.sigma": "0.0001",
        "optimizer.learning_rate": "5e-05",
    }
    return Preset(options, "arXiv:2506.09034")


def lozo() -> Preset:
    """Return the settings for rank 2, with one factor kept for 50 generations (LOZO)."""
    root = math.sqrt(rank := 2)
    options = {
        **_MEZO,
        "search_space": "lazy_low_rank",
        "search_space.rank": str(rank),
        "optimizer": "lozo",
        "optimizer.interval": "50",
        "optimizer.sigma": repr(_EPSILON * root),
        "optimizer.learning_rate": repr(_ETA / (_EPSILON * root)),
    }
    return Preset(options, "arXiv:2410.07698")


def qzo() -> Preset:
    """Return the settings for scales of a quantised model, with clipped derivatives (QZO)."""
    options = {**_MEZO, "search_space": "quant_scales", "fitness.clip": f"{100 * _EPSILON:g}"}
    return Preset(options, "arXiv:2505.13430")
