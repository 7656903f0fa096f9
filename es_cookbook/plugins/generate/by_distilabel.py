"""The same questions through a distilabel pipeline, whose steps run in separate processes.

distilabel's own `OpenAILLM` loses a whole batch if one question fails. The model here uses
`answer_to`, so each question has its seed and its retries. Answers come when all are there.
"""

# distilabel is an optional package: where it is not installed, its classes are unknown.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false

import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import chz
from distilabel.models.llms import AsyncLLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import TextGeneration
from typing_extensions import override

from es_cookbook.common.errors import ServerError
from es_cookbook.plugins.generate.asking import GenerateConfig, Outcome, Question, answer_to
from es_cookbook.plugins.judges.chat import Completion

# Steps are forked. With a handler of SIGTERM, as commands and Ray have one, a process that its pool
# ends would first wait for its threads, and the pool for it.
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class _ChatLLM(AsyncLLM):
    """A model behind an OpenAI-compatible server; `options` are a GenerateConfig's fields."""

    options: dict[str, Any]

    @property
    @override
    def model_name(self) -> str:
        return self.options["model"]

    @override
    async def agenerate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: list[dict[str, str]], num_generations: int = 1
    ) -> dict[str, Any]:
        _, prompt, seed = json.loads(input[-1]["content"])
        try:
            outcome = await answer_to(GenerateConfig(**self.options), prompt, seed)
        except ServerError as error:
            outcome = str(error)
        return {"generations": [json.dumps(outcome)], "statistics": {}}


def ask(
    config: GenerateConfig, missing: Sequence[Question], collect: Callable[[str, Outcome], None]
) -> None:
    """Ask, and pass the outcome of each question to `collect` with its key."""
    options = {name: getattr(config, name) for name in chz.chz_fields(GenerateConfig)}
    data = [{"instruction": json.dumps(each)} for each in missing]
    with Pipeline(name="generate") as pipeline:
        rows = LoadDataFromDicts(data=data, batch_size=config.concurrency)
        task = TextGeneration(
            llm=_ChatLLM(options=options),
            input_batch_size=config.concurrency,
            add_raw_output=False,
            add_raw_input=False,
        )
        rows >> task  # pyright: ignore[reportUnusedExpression]
    for row in pipeline.run(use_cache=False)["default"]["train"]:
        outcome = json.loads(row["generation"] or '"the pipeline lost it"')
        key, _, _ = json.loads(row["instruction"])
        collect(key, outcome if isinstance(outcome, str) else Completion(*outcome))
