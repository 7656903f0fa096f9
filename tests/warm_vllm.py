"""vLLM's processes, forked from one that has imported vLLM already: that is most of their start.

They are told what vLLM tells a fresh process, the environment included. Fresh ones are started by
the engines in Ray actors (`integration/test_ray_vllm.py`).
"""

import os
from multiprocessing.context import ForkServerContext, ForkServerProcess

# What an engine's process imports first. Its worker stays out: it imports numba, and vLLM goes
# through all modules before that.
from vllm.v1.engine import core  # noqa: F401 - so that no fork has to
from vllm.v1.executor import multiproc_executor


class WarmProcess(ForkServerProcess):
    """A fork of the server, in the environment of whoever starts it."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class WarmContext(ForkServerContext):
    """Stands in for multiprocessing's "spawn"."""

    Process = WarmProcess


def warm_context() -> WarmContext:
    context = WarmContext()
    context.set_forkserver_preload([__name__])
    return context


# Ranks are started by an engine's process, which is a fork of one that has imported this.
multiproc_executor.get_mp_context = warm_context
