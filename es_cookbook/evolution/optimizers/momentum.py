"""Momentum, Muon and ClipUp: the centre follows a moving sum of the gradients.

Momentum (Polyak 1964, as an average):

    v = Σ_j m^age g_j / Σ_j m^age,   centre <- centre + α v

Because the weights add up to 1, a steady gradient gives plain ES's steady step, so α keeps its
meaning for any m. The gain is a step whose noise is that of about (1 + m) / (1 - m)
generations instead of one; over the whole run a seed moves the centre as far as in plain ES, only
spread over the window. Trap: the sum in place of the average, see `window`.

Cost: the noise of `window` generations a step in place of one; no memory.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.evolution.genome import MuonRule, Step
from es_cookbook.evolution.optimizers.base import Auto, number
from es_cookbook.evolution.optimizers.es import step_length
from es_cookbook.evolution.optimizers.window import (
    Gradient,
    WindowedES,
    average_weights,
    mean_square,
    scaled,
)

_PUSHES = math.fsum(0.9**age for age in range(10))
"""Total weight of a gradient while it is remembered, by default."""


@chz.chz
class Momentum(WindowedES):
    """Evolution strategies with momentum."""

    momentum: float = chz.field(default=0.9, doc="m: share of the average that is kept")

    _momentum = in_range("momentum", at_least=0, below=1)

    @override
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        # α v, with v = Σ_j m^age g_j / Σ_j m^age
        weights = average_weights(self.momentum, len(gradients))
        rate = number(self.learning_rate) * factor
        return Step(scaled(gradients, [rate * weight for weight in weights]))


@chz.chz
class Muon(Momentum):
    """Evolution strategies with orthogonalised momentum: all singular values made equal.

    Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/): the averaged gradient G = U S
    Vᵀ of a weight matrix is replaced by about U Vᵀ, by five rounds of a Newton-Schulz iteration.
    Directions that few genomes spoke for count as much as those that many did.

        centre <- centre + α · RMS(v) / RMS(U Vᵀ) · U Vᵀ

    with v the average of `momentum`, of this matrix. So the update has the RMS that momentum's has,
    and α keeps its meaning for any rank of the noise and factors on σ. (Muon
    proper has no such factor: its gradients' lengths say nothing. Here a generation with little
    signal makes a small step.) Parameters other than matrices get plain momentum's update.

    Trap: the iteration is matrix products, which round as each library likes; here they are exact
    (`evolution.exact`), so the centre is the same on every machine. And with few terms the update
    has no more directions than terms: equal singular values then only mean equal weights for all
    seeds, which is what ranks nearly do.

    Cost: momentum's noise, and of each matrix one float32 and about five float64 copies while it
    moves; 15 products of its shorter side squared times its longer side.
    """

    adds_terms: ClassVar[bool] = False

    iterations: int = chz.field(default=5, doc="rounds of the Newton-Schulz iteration")

    _iterations = in_range("iterations", at_least=1)

    @override
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        step = super().step(gradients, factor, kept)
        return Step(step.terms, rule=MuonRule(step.rms, self.iterations)) if step.terms else step


@chz.chz
class ClipUp(WindowedES):
    """Evolution strategies with ClipUp: normalised gradients, heavy-ball momentum, a speed limit.

    Toklu, Liskowski and Srivastava 2020 (arXiv:2008.02387):

        v <- m v + α g / ‖g‖;   v <- v · min(1, v_max / ‖v‖);   centre <- centre + v

    Lengths are RMS per parameter here, known from coefficients alone: noise has unit variance and
    seeds are independent. So `learning_rate` is the RMS of one generation's push and `max_speed`
    that of the step, in the parameters' own units, for any fitness; the paper advises
    max_speed = 2 α.

    Without the limit the steady speed would be α / (1 - m), the very divergence that `window` warns
    of; the limit is what makes the heavy-ball form safe. Trap: normalising makes a full step of a
    generation that hardly said anything. One that said nothing at all only lets the speed fall.

    Cost: momentum's. Gradients that leave the window are dropped, at m = 0.9 and 10 generations
    with a third of their push.
    """

    finds: ClassVar[Collection[str]] = ("sigma", "learning_rate", "max_speed")

    momentum: float = chz.field(default=0.9, doc="m: share of the speed that is kept")
    max_speed: Auto = chz.field(
        default=1e-3,
        doc="greatest RMS of a step per parameter; about twice learning_rate; auto: from sigma",
    )

    @classmethod
    @override
    def carried(cls, es: Mapping[str, object]) -> dict[str, object]:
        """Return settings in which a gradient's pushes add up to plain ES's step."""
        push, speed = step_length(es, 1 / _PUSHES), step_length(es, 2 / _PUSHES)
        return {**super().carried(es), "learning_rate": push, "max_speed": speed}

    _momentum = in_range("momentum", at_least=0, below=1)
    _max_speed = in_range("max_speed", above=0)

    @override
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        """Return the velocity; `kept` holds each gradient's weight in it."""
        squares = [mean_square(gradient) for gradient in gradients]
        newest = math.sqrt(squares[-1])
        push = number(self.learning_rate) * factor / newest if newest else 0.0
        # v <- m v + α g / ‖g‖
        scales = [*(scale * self.momentum for scale in kept), push][-len(squares) :]
        pairs = zip(scales, squares, strict=True)
        speed = math.sqrt(math.fsum(scale * scale * square for scale, square in pairs))
        limit = number(self.max_speed) * factor
        if speed > limit:  # v <- v · min(1, v_max / ‖v‖)
            scales = [scale * (limit / speed) for scale in scales]
        kept[:] = scales
        return Step(scaled(gradients, scales))
