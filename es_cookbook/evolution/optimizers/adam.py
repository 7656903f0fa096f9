"""Adam and RMSProp on ES gradients: steps divided by the root of a moving second moment.

Kingma and Ba 2015 (arXiv:1412.6980); RMSProp (Tieleman and Hinton 2012) is Adam without the first
moment's memory:

    centre <- centre + α m / (√v + ε),   m = average of g_j by beta1,   v = average of g_j² by beta2

over the window, both averages corrected (`window`). α is thus about the RMS of a step, in the
parameters' own units, as in ClipUp: of the order of σ/4, and not plain ES's learning rate.

Two ways to have v. "element": element by element, made again from the window's noise where the
centre is (`genome.AdamRule`), exactly, with no state. "block": one number for a whole tensor. Noise
is isotropic, so every tensor's mean of g² is the same Σ c², known from coefficients alone; v then
costs nothing, and what is left of Adam is that a step's length does not depend on the fitness'.

Trap: an ES gradient's elements are nearly all noise, each of about the same variance. So v says how
large the noise was that the window happened to have there, not how steep the landscape is, and
dividing by it is not the preconditioning that Adam is for backpropagation.

Cost of "element": the noise of `window` generations a step, and three copies of the largest
parameter for each thread while it moves. Of "block": as momentum; with beta1 = 0 as plain ES.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import chz
from typing_extensions import override

from es_cookbook.common.checks import in_range
from es_cookbook.evolution.genome import AdamRule, Step
from es_cookbook.evolution.optimizers.base import number
from es_cookbook.evolution.optimizers.es import step_length
from es_cookbook.evolution.optimizers.window import (
    Gradient,
    WindowedES,
    average_weights,
    mean_square,
    scaled,
)


@chz.chz
class Adam(WindowedES):
    """Evolution strategies with Adam."""

    adds_terms: ClassVar[bool] = False

    beta1: float = chz.field(default=0.9, doc="share of the mean gradient that is kept")
    beta2: float = chz.field(default=0.99, doc="share of the mean squared gradient that is kept")
    epsilon: float = chz.field(default=1e-8, doc="added to the root of the mean squared gradient")
    moments: Literal["element", "block"] = chz.field(
        default="element", doc="squared gradients of every element, or one number a tensor"
    )

    @classmethod
    @override
    def carried(cls, es: Mapping[str, object]) -> dict[str, object]:
        """Return settings whose learning rate is a length: that of plain ES's step."""
        return {**super().carried(es), "learning_rate": step_length(es)}

    _betas = in_range("beta1", "beta2", at_least=0, below=1)
    _epsilon = in_range("epsilon", above=0)

    @override
    def step(self, gradients: Sequence[Gradient], factor: float, kept: list[float]) -> Step:
        """Return the window's terms with the rule, or scaled by one number."""
        rate = number(self.learning_rate) * factor
        first = average_weights(self.beta1, len(gradients))
        second = average_weights(self.beta2, len(gradients))
        pairs = zip(first, gradients, strict=True)
        if not rate or not any(weight and gradient for weight, gradient in pairs):
            return Step()
        if self.moments == "element":
            terms = tuple(term for gradient in gradients for term in gradient)
            counts = tuple(map(len, gradients))
            rule = AdamRule(counts, tuple(first), tuple(second), rate, self.epsilon)
            return Step(terms, rule=rule)
        # α m / (√v + ε), with one v for a whole tensor
        v = math.fsum(w * mean_square(g) for w, g in zip(second, gradients, strict=True))
        return Step(scaled(gradients, [rate * w / (math.sqrt(v) + self.epsilon) for w in first]))


@chz.chz
class RMSProp(Adam):
    """Evolution strategies with RMSProp."""

    beta1: float = chz.field(default=0.0, doc="share of the mean gradient that is kept")
