"""What tests of real vLLM share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def warm_vllm() -> Iterator[None]:
    """Engines of a module start their processes from one that has imported vLLM."""
    from vllm.v1.engine import utils

    from tests.integration.warm_vllm import warm_context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_mp_context", warm_context)
        yield
