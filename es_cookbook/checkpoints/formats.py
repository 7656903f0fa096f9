"""What a model's name may stand for, besides a model directory.

A format returns the model directory of a name on the Hub, a file of another program or a run. It is
registered in the group `formats`, and the code that loads models only sees the directory.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias, cast

from es_cookbook.common.errors import ConfigError
from es_cookbook.common.registry import Registered
from es_cookbook.common.terminal import say_once
from es_cookbook.common.trust import load

Part: TypeAlias = Literal["config", "tokenizer", "weights"]
"""Which files of a model are needed; "weights" includes the others."""
FORMATS = Registered("formats")
"""Name -> a subclass of `Format`, which is made without arguments."""


class Format(ABC):
    """One format, which is asked for every name that is no model directory itself.

    Attributes:
        accepted: what it accepts, as errors list it: "a GGUF file".
    """

    accepted: ClassVar[str]

    @abstractmethod
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        """The model directory that a name stands for; None if the name is not of this format.

        A format that fetches files may fetch only this part of them.

        Raises:
            ModelError: It is of this format, and there is no such model or it cannot be read.
        """


def formats() -> Iterator[Format]:
    """All registered formats, in the order of their names, but for those that cannot be used."""
    for name in FORMATS:
        try:
            yield cast("type[Format]", load(FORMATS[name]))()
        except ConfigError as error:
            say_once(f"the format {name} is not used: {error}")
