"""`es-cookbook COMMAND name=value ...`, and the same as `python -m es_cookbook COMMAND ...`."""

import importlib
import sys

COMMANDS = {
    "resume": "es_cookbook.commands.resume",
    "fork": "es_cookbook.commands.fork",
    "rewind": "es_cookbook.commands.rewind",
    "play": "es_cookbook.commands.play",
    "export": "es_cookbook.commands.export",
    "hub": "es_cookbook.commands.hub",
    "plan": "es_cookbook.commands.plan",
}


def main() -> None:
    """Run the command that is named first."""
    _, command, *options = sys.argv
    sys.argv = [f"es-cookbook {command}", *options]
    importlib.import_module(COMMANDS[command]).cli()


if __name__ == "__main__":
    main()
