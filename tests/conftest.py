"""What every test shares: one thread, one async backend, no network, a steady hypothesis."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported anywhere: pytest-xdist runs a process a core, and threads on top of that
# only wait for each other. A user's own setting wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use what is in the package and what they make themselves; a Hub name that slips in fails at
# once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest
from hypothesis import HealthCheck, settings

# A shell starts what runs in the background with Ctrl-C ignored, programs pass that on to those
# that they start, and the runs to which tests send a Ctrl-C would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a loaded machine is not a failure. Derandomised: the same examples on every run and
# machine.
settings.register_profile(
    "es_cookbook",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("es_cookbook")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts vLLM or Ray is slow; other slow tests are marked where they are."""
    for item in items:
        if "integration" in item.path.parts or item.get_closest_marker("xdist_group"):
            item.add_marker("slow")


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, which the engines use."""
    return "asyncio"


@pytest.fixture(scope="module")
def warm_vllm() -> Iterator[None]:
    """Engines of a module start their processes from one that has imported vLLM."""
    pytest.importorskip("vllm", reason="vLLM is not installed, and could not be: see the Makefile")
    from vllm.v1.engine import utils

    from tests.warm_vllm import warm_context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_mp_context", warm_context)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, by family; each is written once a session."""
    from tests.tiny_models import make_tiny_model  # it imports torch

    root = tmp_path_factory.mktemp("tiny_models")

    def path_of(family: str) -> Path:
        path = root / family
        return path if path.exists() else make_tiny_model(family, path)

    return path_of
