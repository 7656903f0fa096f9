"""The process in which distilabel runs: rows into a task, whose model is asked by `generate.py`.

`by_distilabel.py` starts it with the path of a JSON file that it has written. distilabel's own
`OpenAILLM` has one set of options for all questions, drops why an answer ended, and takes an empty
answer for one; so the model here is ours: each question has its seed, and is asked again as in the
plain way.
"""

# distilabel is an optional package: where it is not installed, its classes are unknown.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportGeneralTypeIssues=false

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from distilabel.models.llms import AsyncLLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import Task
from pydantic import PrivateAttr
from typing_extensions import override

from es_cookbook.common.errors import ServerError
from es_cookbook.plugins.generate.generate import GenerateConfig, answer_to


class _ChatLLM(AsyncLLM):
    """A model behind an OpenAI-compatible server; every outcome is sent as soon as it is there.

    Attributes:
        options: the fields of the GenerateConfig.
        address: the socket that outcomes are sent to, a line of JSON each.
    """

    options: dict[str, Any]
    address: str
    _config: GenerateConfig = PrivateAttr()
    _socket: socket.socket = PrivateAttr()

    @override
    def load(self) -> None:
        super().load()
        self._config = GenerateConfig(**self.options)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(self.address)

    @property
    @override
    def model_name(self) -> str:
        return self.options["model"]

    @override
    async def agenerate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: str, num_generations: int = 1
    ) -> dict[str, Any]:  # What has no default would have to be given to the pipeline.
        key, prompt, seed = json.loads(input)
        outcome, refused = "", None
        try:
            outcome = await answer_to(self._config, prompt, seed)
        except ServerError as error:
            refused = str(error)
        answer, lost = (None, outcome) if isinstance(outcome, str) else (outcome, None)
        line = [key, answer, lost, refused]
        try:
            self._socket.sendall(json.dumps(line).encode() + b"\n")
        except OSError:  # Nobody waits for answers any more.
            os.killpg(0, signal.SIGKILL)
        return {"generations": [answer.text if answer else ""], "statistics": {}}


class _Ask(Task):
    """Asks the model what stands in a row."""

    @property
    @override
    def inputs(self) -> list[str]:
        return ["asked"]

    @property
    @override
    def outputs(self) -> list[str]:
        return ["completion", "model_name"]

    @override
    def format_input(self, input: dict[str, Any]) -> str:
        return input["asked"]

    @override
    def format_output(
        self, output: str | None, input: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"completion": output}


def main(path: Path) -> None:
    what = json.loads(path.read_text(encoding="utf-8"))
    directory, size = Path(what["directory"]), what["options"]["concurrency"]
    with Pipeline(name="generate", cache_dir=directory / "cache") as pipeline:
        rows = LoadDataFromDicts(
            data=[{"asked": json.dumps(each)} for each in what["asked"]], batch_size=size
        )
        model = _ChatLLM(options=what["options"], address=str(directory / "outcomes"))
        ask = _Ask(llm=model, input_batch_size=size, add_raw_output=False, add_raw_input=False)
        rows >> ask  # pyright: ignore[reportUnusedExpression]
    pipeline.run(use_cache=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
