"""Forms of an export, by name: the files that other programs load."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import chz
from typing_extensions import override

from es_cookbook.common.checks import check_types
from es_cookbook.common.registry import Registered

if TYPE_CHECKING:  # Options do without torch.
    from es_cookbook.runs.export.forms import CentreFiles, Written

EXPORT_FORMS = Registered("exports")
"""Names on the command line."""


@chz.chz
class ExportForm(ABC):
    """Form of an export."""

    _types = chz.validate(check_types)

    @abstractmethod
    def __call__(self, centre: "CentreFiles", directory: Path, final: Path) -> "Written":
        """Write a centre.

        Args:
            centre: writes itself as a model directory or an adapter, to be kept or converted.
            directory: directory to be filled.
            final: path of the directory once it is finished.

        Raises:
            ModelError: A model that this form cannot hold.
            OSError: It cannot be written.
        """


@chz.chz
class Transformers(ExportForm):
    """Directory for transformers, PEFT and vLLM."""

    @override
    def __call__(self, centre: "CentreFiles", directory: Path, final: Path) -> "Written":
        return centre.write(directory, final)
