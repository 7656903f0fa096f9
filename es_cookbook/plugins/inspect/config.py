"""Options of the command `inspect`."""

import json
import os
from typing import cast

import chz

from es_cookbook.cli.options import Answering, RunOrModel
from es_cookbook.common.checks import check_range
from es_cookbook.common.errors import ConfigError
from es_cookbook.rl.messages.chat import ChatOptions


@chz.chz
class InspectConfig(RunOrModel, Answering):
    """Evaluate a run's centre, its base, a genome, or a model, with a task of inspect-ai."""

    task: str = chz.field(
        doc="a task of inspect-ai: my_task.py, my_task.py@name, or package/name of an installed "
        "package"
    )
    task_args: str = chz.field(
        default="{}", doc="the task's arguments, as JSON: '{\"fewshot\": 0}'"
    )
    limit: int | None = chz.field(default=None, doc="maximum number of samples; None: all")
    epochs: int | None = chz.field(default=None, doc="answers per sample; None: as the task says")
    log_dir: str = chz.field(default="logs", doc="directory of inspect's logs")
    temperature: float = chz.field(default=0.0, doc="0 is greedy; a task's own takes precedence")
    max_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens per turn; None: the run's own; a task's own takes precedence",
    )
    seed: int = chz.field(default=0, doc="sampling seed")
    chat: ChatOptions = chz.field(default_factory=ChatOptions, doc="how chats and tools are shown")

    @chz.validate
    def _ranges(self) -> None:
        check_range(self, "limit", "epochs", "max_tokens", at_least=1)
        check_range(self, "temperature", "seed", at_least=0)
        if not self.log_path and self.model_name is None:
            raise ConfigError("give log_path=RUN or model_name=MODEL: what is to be evaluated")
        if not self.log_path and self.genome != "centre":
            raise ConfigError("genome= needs a run: give log_path=RUN")
        self.arguments()

    @property
    def subject(self) -> str:
        """Name of what is evaluated: a model, the centre, the base or a genome."""
        if not self.log_path:
            return os.path.basename(os.path.abspath(str(self.model_name)))
        return f"genome/{self.genome}" if isinstance(self.genome, int) else self.genome

    def arguments(self) -> dict[str, object]:
        """Return the task's arguments.

        Raises:
            ConfigError: They are not a JSON object.
        """
        try:
            found = json.loads(self.task_args)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"task_args must be a JSON object, found {self.task_args:.60}")
        return cast("dict[str, object]", found)
