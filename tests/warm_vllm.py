"""vLLM's processes, forked from one that has imported vLLM already: that is most of their start.

They are told what vLLM tells a fresh process, the environment included. Fresh ones are started by
the engines in Ray actors (`integration/test_ray_vllm.py`).
"""

import gc
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess


class WarmProcess(ForkServerProcess):
    """A fork of the server, in the environment of whoever starts it."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        # vLLM looks for garbage eight times, for seconds in all, in what the server imported.
        gc.freeze()
        gc.collect = lambda generation=2: 0
        super().run()


class WarmContext(ForkServerContext):
    """Stands in for multiprocessing's "spawn"."""

    Process = WarmProcess


def warm_context() -> WarmContext:
    context = WarmContext()
    context.set_forkserver_preload(["tests.warm_imports"])
    return context
