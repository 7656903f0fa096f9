"""ClipUp: normalised gradients, heavy-ball momentum, and a speed limit.

Toklu, Liskowski and Srivastava 2020 (arXiv:2008.02387):

    v <- m v + α g / ‖g‖;   v <- v · min(1, v_max / ‖v‖);   centre <- centre + v

Lengths are RMS per parameter here, known from coefficients alone: noise has unit variance and seeds
are independent. So `learning_rate` is the RMS of one generation's push and `max_speed` that of the
step, in the parameters' own units, whatever the fitness; the paper advises max_speed = 2 α.

Without the limit the steady speed would be α / (1 - m), the very divergence that `window` warns of;
the limit is what makes the heavy-ball form safe. Trap: normalising makes a full step of a
generation that hardly said anything. One that said nothing at all only lets the speed fall.

Cost: the noise of `window` generations a step; no memory. What leaves the window is forgotten, at
m = 0.9 and 10 generations a third of its push.
"""

import math
from collections.abc import Mapping, Sequence

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.evolution.genome import Step
from es_cookbook.evolution.optimizers.es import step_length
from es_cookbook.evolution.optimizers.window import Gradient, WindowedES, mean_square, scaled

_PUSHES = math.fsum(0.9**age for age in range(10))
"""How often a gradient's push counts in all while it is remembered, by default."""


@chz.chz
class ClipUp(WindowedES):
    """Evolution strategies with ClipUp."""

    momentum: float = chz.field(default=0.9, doc="m: share of the speed that is kept")
    max_speed: float = chz.field(
        default=1e-3, doc="greatest RMS of a step per parameter; about twice learning_rate"
    )

    @classmethod
    @override
    def carried(cls, es: Mapping[str, object]) -> dict[str, object]:
        """A gradient's pushes, while it is remembered, add up to plain ES's step."""
        push = step_length(es) / _PUSHES
        return {**super().carried(es), "learning_rate": push, "max_speed": 2 * push}

    @chz.validate
    def _speed(self) -> None:
        check_range(self, "momentum", at_least=0, below=1)
        check_range(self, "max_speed", above=0)

    @override
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        """The velocity, of which `kept` is what each gradient has in it."""
        squares = [mean_square(gradient) for gradient in gradients]
        newest = math.sqrt(squares[-1])
        push = self.learning_rate * factor / newest if newest else 0.0
        # v <- m v + α g / ‖g‖
        scales = [*(scale * self.momentum for scale in kept), push][-len(squares) :]
        pairs = zip(scales, squares, strict=True)
        speed = math.sqrt(math.fsum(scale * scale * square for scale, square in pairs))
        limit = self.max_speed * factor
        if speed > limit:  # v <- v · min(1, v_max / ‖v‖)
            scales = [scale * (limit / speed) for scale in scales]
        kept[:] = scales
        return Step(scaled(gradients, scales))
