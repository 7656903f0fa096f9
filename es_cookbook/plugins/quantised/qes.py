"""QES: steps on a grid of integers with error feedback, which keeps what rounding left out.

Quantized Evolution Strategies (Xu, Miikkulainen and Qiu 2026, arXiv:2602.03120), for the codes of a
quantised checkpoint (`spaces.QuantCodes`). A step of ES is a small part of a code, so rounded
to the grid by itself it is nothing, in every generation: the centre never moves (shown in the
tests). Error feedback keeps what rounding left out:

    s_t = decay · e_{t-1} + u_t,    d_t = rint(s_t),    e_t = s_t - d_t,    code <- clip(code + d_t)

with u_t = α/N · Σ_g fitness_g · (what genome g was changed by) / σ. That is a whole number over σ,
not ε: of the few codes that a genome changed at all, each says much, and the others, which would
add nothing but noise, say nothing.

The residual e is as large as the model, and is not kept. It is made again from the terms of the
last `window` generations, beginning at 0 (`genome.ErrorFeedbackRule`), so the step is a function of
what the history records. What that leaves out is a residual of at most ½ that has decayed `window`
times, ½ · 0.9⁵⁰ < 0.003 of a code. It hardly ever rounds otherwise where a code seldom moves within
a window, as in a language model. A code that moves often may do so a few generations earlier or
later than with a residual that was kept, since what moved it in the window is made again too; its
sum follows the updates all the same (both in the tests).

Trap: decay < 1 forgets. A gradient that adds u to every s saturates at u / (1 - decay), and never
reaches ½ if u is below ½ (1 - decay) = 0.05: α has to be large enough for codes to flip at all. The
defaults are those of the authors' runs with 4 bits: σ = 0.005, and α = 50 · 3e-4, because they had
50 genomes and did not divide by their number. There a pair of twins whose z-scores differ by 2 adds
0.12 to each s that it changed; fewer genomes add more.

Cost: the noise of `window` generations and a uniform number beside each, in every step; three
copies of the largest parameter for each thread while it moves.

Left out: the authors' residuals begin at a random phase in the first step of a run, and are
clipped to ±1.5 where codes cannot move any further.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import ClassVar

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.evolution.fitness import Floats
from es_cookbook.evolution.genome import ErrorFeedbackRule, Genome, Step, Term
from es_cookbook.evolution.optimizers.es import ES, ESOptimizer
from es_cookbook.evolution.spaces.base import SearchSpace, SearchSpaceBuilder


@chz.chz
class QES(ES):
    """Quantized Evolution Strategies (Xu et al. 2026), on search_space=quant_codes."""

    adds_terms: ClassVar[bool] = False
    finds: ClassVar[Collection[str]] = ()  # A found sigma is not a number of codes.
    not_carried: ClassVar[Collection[str]] = ("sigma", "learning_rate")  # Here they are in codes.

    sigma: float = chz.field(
        default=5e-3, doc="standard deviation of the perturbations before rounding, in codes"
    )
    learning_rate: float = chz.field(
        default=1.5e-2, doc="α of the update α/N · Σ fitness · change / σ, before rounding"
    )
    window: int = chz.field(
        default=50, doc="generations that the residual is made from; their noise is made each step"
    )
    residual_decay: float = chz.field(
        default=0.9, doc="share of the rounding error that is carried to the next generation"
    )

    @chz.validate
    def _residual(self) -> None:
        check_range(self, "window", at_least=1, at_most=2**31)
        check_range(self, "residual_decay", at_least=0, below=1)
        if self.weight_decay:
            raise ConfigError(
                f"weight_decay must be 0 with qes, found {self.weight_decay}: codes are whole "
                "numbers, which cannot move a share of the way back to the base"
            )

    @override
    def check_run(self, search_space: SearchSpaceBuilder, num_generations: int) -> None:
        super().check_run(search_space, num_generations)
        if "codes" not in search_space.kinds:
            raise _needs_codes(search_space)

    @override
    def __call__(self, *, run_seed: int, num_generations: int, space: SearchSpace) -> ESOptimizer:
        return _QESOptimizer(self, run_seed, num_generations, space)


def _needs_codes(found: SearchSpaceBuilder | SearchSpace) -> ConfigError:
    return ConfigError(
        "optimizer=qes moves whole numbers: add search_space=quant_codes, with a GPTQ or "
        f"compressed-tensors checkpoint as model_name; found {type(found).__name__}"
    )


class _QESOptimizer(ESOptimizer):
    """Moves codes by whole numbers and carries the rounding error on."""

    def __init__(
        self, config: QES, run_seed: int, num_generations: int, space: SearchSpace
    ) -> None:
        super().__init__(config, run_seed, num_generations, space)
        if space.highest_code is None:
            raise _needs_codes(space)
        self._residual_decay = config.residual_decay
        self._highest = space.highest_code
        self._tried = deque[list[tuple[Term, float]]](maxlen=config.window)

    @override
    def move(self, generation: int, genomes_G: Sequence[Genome], fitness_G: Floats) -> Step:
        """Return the terms that the window's genomes tried, and what each counts for."""
        size = {term.seed: abs(term.coefficient) for g in genomes_G for term in g.terms}
        gradient = self.gradient(genomes_G, fitness_G, self.learning_rate(generation))
        newest = [(Term(t.seed, size[t.seed]), t.coefficient / size[t.seed]) for t in gradient]
        self._tried.append(newest)
        tried = [pair for of_generation in self._tried for pair in of_generation]
        if not gradient:  # a residual alone, at most ½, is never rounded up
            return Step()
        rule = ErrorFeedbackRule(
            counts=tuple(map(len, self._tried)),
            weights=tuple(weight for _, weight in tried),
            residual_decay=self._residual_decay,
            highest=self._highest,
        )
        return Step(tuple(term for term, _ in tried), rule=rule)
