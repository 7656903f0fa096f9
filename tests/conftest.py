"""What every test shares: one thread, one async backend, no network, a steady hypothesis."""

import atexit
import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# Before torch is imported anywhere: pytest-xdist runs a process a core, and threads on top of that
# only wait for each other. A user's own setting wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests use what is in the package and what they make themselves; a Hub name that slips in fails at
# once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["no_proxy"] = "127.0.0.1"  # Where all servers of tests are.

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from es_cookbook.common import registry
from tests import families
from tests.distributions import Register, write_metadata
from tests.hub_server import HubServer
from tests.programs import Programs

# A shell starts what runs in the background with Ctrl-C ignored, programs pass that on to those
# that they start, and the runs to which tests send a Ctrl-C would go on for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test ends the machine, and to wait for its disk takes milliseconds each time.
os.fsync = lambda _: None

# No deadline: a loaded machine is not a failure. Derandomised: the same examples on every run and
# machine; so none are taken from the code of the modules that happen to be loaded, which also takes
# seconds of every process.
providers.is_local_module_file = lambda path: False
settings.register_profile(
    "es_cookbook",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fast", settings.get_profile("es_cookbook"), max_examples=10)
settings.load_profile("es_cookbook")


LONGEST = (
    "tests/test_house.py::test_the_types_hold",
    "tests/runs/directory/test_damaged_directories.py::",
    "tests/plugins/gradients/commands/test_compare_gradients.py::test_a_comparison_",
    "tests/cli/test_trust.py::test_opening_a_hostile_run",
    "tests/test_gpu_benchmark.py::test_a_dry_run",
    "tests/test_notebooks.py::test_a_notebook_runs",
    "tests/evolution/noise/test_triton_kernels.py::test_in_tritons_interpreter",
    "tests/engines/torch/test_centre_in_engine.py::test_perturbing_and_moving_",
    "tests/engines/torch/test_model_families.py::",
    "tests/runs/test_loop.py::test_killed_over_and_over",
    "tests/engines/torch/test_turns.py::",
    "tests/engines/torch/test_batch_invariance.py::",
    "tests/recipes/countdown/test_train_cli.py::test_the_command_trains",
)
"""Beginnings of the names of tests that take longest, and so begin first: one that began last would
keep one process busy while the others wait. xdist takes its groups (vLLM, Ray) before them.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep what is imported and collected out of garbage collection: it stays until the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # Or nanobind reports what was never freed.


def pytest_report_header() -> str:
    return f"families of cases: FAMILIES={families.SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what starts vLLM or Ray, and of a `daily` test all cases but one."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "integration" in item.path.parts or item.get_closest_marker("xdist_group"):
            item.add_marker("slow")
        if item.get_closest_marker("daily"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for every in cases.values():
        for item in set(every).difference(families.sampled(every, 1)):
            item.add_marker("slow")
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    """Return the position in `LONGEST`; other tests follow, in the order of the files."""
    places = (i for i, start in enumerate(LONGEST) if item.nodeid.startswith(start))
    return next(places, len(LONGEST))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run async tests on asyncio, which the engines use."""
    return "asyncio"


@pytest.fixture(scope="module")
def warm_vllm() -> Iterator[None]:
    """Start the engines' processes of a module from a process that has imported vLLM."""
    pytest.importorskip("vllm", reason="vLLM is not installed, and could not be: see the Makefile")
    from vllm.v1.engine import utils

    from tests.warm_vllm import warm_context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_mp_context", warm_context)
        yield


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Return what starts programs in separate processes without the time for imports."""
    started = Programs(tmp_path_factory.mktemp("programs"))
    yield started
    started.close()


@pytest.fixture
def quick_python(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the programs of the package in the same way."""
    monkeypatch.setattr(sys, "executable", str(programs.python))


@pytest.fixture(autouse=True)
def same_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what runs leave: wandb's `sys.exit`, folders of trusted scripts, distilabel's log level.

    With that of the root logger each request of a later test would be a message in its log.
    """
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "path", [*sys.path])
    level = logging.root.level
    yield
    logging.root.setLevel(level)


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Register parts as another distribution would, for one test."""

    def registered(
        groups: Mapping[str, Mapping[str, str]],
        name: str = "other",
        version: str = "1.0",
        api: str | None = registry.API,
    ) -> Path:
        folder = tmp_path / "distributions" / name
        write_metadata(folder, groups, name, version, api)
        monkeypatch.syspath_prepend(str(folder))
        registry.groups.cache_clear()
        return folder

    yield registered
    registry.groups.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family to the directory of its tiny model, written once."""
    from tests.tiny_models import make_tiny_model  # it imports torch

    root = tmp_path_factory.mktemp("tiny_models")

    def path_of(family: str) -> Path:
        path = root / family
        return path if path.exists() else make_tiny_model(family, path)

    return path_of


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Yield a Hub on this machine, to which all requests to the Hub go."""
    from huggingface_hub import close_session

    with HubServer() as server:
        server.lead_here(monkeypatch)
        yield server
    close_session()  # It has connections to the server.
