"""`es-cookbook COMMAND name=value ...`, and the same as `python -m es_cookbook COMMAND ...`."""

from es_cookbook.cli import COMMANDS, RECIPES, main

__all__ = ["COMMANDS", "RECIPES", "main"]

if __name__ == "__main__":
    main()
