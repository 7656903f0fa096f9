"""The small models that recipes bring along: `bundled:countdown`."""

from pathlib import Path

from typing_extensions import override

from es_cookbook.checkpoints.formats import Format, Part
from es_cookbook.common.errors import ModelError, nearest
from es_cookbook.common.registry import Registered
from es_cookbook.common.trust import source_of

_PREFIX = "bundled:"
_RECIPES = Registered("recipes")


class Bundled(Format):
    """The folder `model` beside the module of a recipe."""

    accepted = f"the model of a recipe ({_PREFIX}countdown)"

    @override
    def directory(self, model_name: str, part: Part = "weights") -> Path | None:
        if not model_name.startswith(_PREFIX):
            return None
        name = model_name.removeprefix(_PREFIX)
        if name in _RECIPES and (found := _folder(name)) is not None:
            return found
        have = [each for each in _RECIPES if _folder(each) is not None]
        raise ModelError(
            f"model_name: no recipe {name!r:.100} brings a model: {nearest(name, have)}"
        )


def _folder(name: str) -> Path | None:
    file = source_of(_RECIPES[name])
    folder = None if file is None else file.parent / "model"
    return folder if folder is not None and folder.is_dir() else None
