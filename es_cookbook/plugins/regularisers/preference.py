"""Preference pairs: the chosen answer should be likelier than the rejected one."""

from collections.abc import Iterable

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_range
from es_cookbook.common.seeds import derive_seed
from es_cookbook.rl.regularisers import AddedProblems, Regulariser
from es_cookbook.rl.types import SOURCE_DOC, Tokenizer


@chz.chz
class PreferencePairs(Regulariser):
    """Preference pairs: the chosen answer should be more likely than the rejected one.

    Nothing is sampled; the genome scores both answers, y⁺ and y⁻, to a prompt x:

        margin = log π(y⁺ | x) − log π(y⁻ | x)       reward = log sigmoid(β (margin − margin_base))

    which is minus the loss of DPO (Rafailov et al. 2023, arXiv:2305.18290), whose gradient an
    evolution strategy estimates like any reward's. With `relative_to_base` false the base's margin
    is left out, and the reward is the likelihood of the preference under the model itself.

    Pitfall: the reward depends on a difference, so both answers may become less likely together;
    adding KL to the base limits that. And a margin is a sum over tokens, in which one long answer
    outweighs many short ones.

    The base scores a pair once per generation, not per genome: two scorings per genome and pair,
    and two per pair. A genome's attempts at one pair are all the same.

    An answer ends with the tokenizer's end-of-sequence token, where it has one, so that an answer
    which is a prefix of another is not always likelier.
    """

    source: str = chz.field(doc=f"{SOURCE_DOC}; of prompt, chosen and rejected")
    chat: bool = chz.field(
        default=True, doc="render a row's prompt as a chat, if the model has a chat template"
    )
    beta: float = chz.field(default=0.1, doc="inverse scale of the margin, as in DPO")
    relative_to_base: bool = chz.field(
        default=True, doc="subtract the base's own margin, as in DPO"
    )

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "beta", above=0)

    @override
    def check(self) -> None:
        from es_cookbook.plugins.regularisers.rows import check_texts  # Only who has rows reads.

        check_texts(self.source, "preference.source", "prompt", "chosen", "rejected")

    @override
    def trained_on(self, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
        from es_cookbook.plugins.regularisers.pairs import digests

        return digests(self.source, tokenizer, chat=self.chat) if self.weight > 0 else ()

    def __call__(self, tokenizer: Tokenizer, context_length: int, run_seed: int) -> AddedProblems:
        """Load the pairs as tokens."""
        from es_cookbook.plugins.regularisers.pairs import load_pairs
        from es_cookbook.plugins.regularisers.rows import dealt

        how = self.chat, self.beta, self.relative_to_base
        problems = load_pairs(self.source, *how, tokenizer, context_length)
        seed = derive_seed(run_seed, "preference")
        return dealt(problems, self.problems_per_generation, seed)
