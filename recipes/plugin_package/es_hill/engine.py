"""The engine on PyTorch with few answers at once, on machines that do other things as well."""

import chz

from es_cookbook import TorchEngineBuilder


@chz.chz
class NarrowEngineBuilder(TorchEngineBuilder):
    """PyTorch, with eight answers at once by default."""

    max_batch_size: int = chz.field(default=8, doc="most answers at once")
