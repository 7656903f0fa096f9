"""Write the centre of a run as files that other programs load.

python -m es_cookbook export log_path=runs/mine output=exported
python -m es_cookbook export log_path=runs/mine generation=20 output=exported
python -m es_cookbook export log_path=runs/mine rank=8 output=adapter
"""

from es_cookbook.common.cli import run_cli
from es_cookbook.runs.export.export import ExportConfig, export


def main(config: ExportConfig) -> None:
    """Export, and say what came out."""
    print(export(config))


def cli() -> None:
    """The console entry point."""
    run_cli(main, ExportConfig)
