"""`es-cookbook` with a function that takes a minute and that nothing interrupts, as C code does.

python tests/long_calls.py MODULE:NAME COMMAND [name=value ...]
"""

import functools
import importlib
import sys
import time
from typing import Any

from es_cookbook.__main__ import main


def last_long(*_: Any, **__: Any) -> None:
    print("it takes long", file=sys.__stderr__, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    module, _, name = sys.argv.pop(1).partition(":")
    *path, last = name.split(".")
    setattr(functools.reduce(getattr, path, importlib.import_module(module)), last, last_long)
    sys.argv[0] = "es-cookbook"
    main()
