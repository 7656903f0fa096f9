"""Whether gold answers can be said: as tokens of the model, and decoded as its answers are.

A gold answer that earns its full reward as a text proves the row, and not yet that the model can
earn it. The model says tokens, of which rewards see the text: letters may come back in another form
or not at all, special tokens are left out (`es_cookbook.rl.messages.answer_texts`), and stop texts
end it. What a reward needs and never sees shows here, before the first generation.
"""

from collections.abc import Iterable, Sequence

from es_cookbook.rl.data.problem_dataset import check_all, unchanged
from es_cookbook.rl.messages.answer_texts import AnswerTexts
from es_cookbook.rl.problem_env import ProblemGroupBuilder
from es_cookbook.rl.types import Datasets, EnvGroupBuilder, SamplingParams, Tokenizer


async def validate(
    datasets: Datasets, tokenizer: Tokenizer, context_length: int, sampling: SamplingParams
) -> None:
    """`RLDataset.validate`, and all gold answers as the model says them.

    A data set that has no list of its problems checks those that it makes itself.

    Raises:
        DataError: As `RLDataset.validate`, and where the model cannot say a gold answer.
    """
    await datasets.train.validate(context_length)
    if problems_P := datasets.train.training_problems:
        await _check_said([*problems_P, *datasets.test_P], tokenizer, sampling)


async def check_attempted(
    problems_P: Sequence[EnvGroupBuilder],
    tokenizer: Tokenizer,
    context_length: int,
    sampling: SamplingParams,
) -> None:
    """All that is checked of problems that are attempted and not trained on.

    Raises:
        DataError: As `EnvGroupBuilder.check`, and where the model cannot say a gold answer.
    """
    await check_all(problems_P, context_length)
    await _check_said(problems_P, tokenizer, sampling)


async def _check_said(
    problems_P: Iterable[EnvGroupBuilder], tokenizer: Tokenizer, sampling: SamplingParams
) -> None:
    """Grade gold answers as the model says them.

    Raises:
        DataError: One earns less so; names the problem, and what is lost on the way.
    """
    texts = AnswerTexts(tokenizer)
    for problem in map(unchanged, problems_P):
        if isinstance(problem, ProblemGroupBuilder):
            await problem.check_said(texts, sampling.stop)
