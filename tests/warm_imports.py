"""Imported by the process that vLLM's processes are forked from (`warm_vllm`), and nowhere else."""

import multiprocessing

import torch._dynamo
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import core  # noqa: F401 - so that no fork has to
from vllm.v1.executor import multiproc_executor

# Goes through all modules, and fails at some of numba's, which the worker imports.
CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)

from vllm.v1.worker import cpu_worker  # noqa: E402, F401

# Ranks are started by an engine's process, which is a fork of this one, and so are they.
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
# Compiling how ranks of tokens are counted takes a second of every engine.
torch._dynamo.config.disable = True
