"""The parts of Ray that a pool needs: a cluster, places in it for engines, a process in a place.

`address="local"` starts a private Ray that only this machine can reach and that ends with the last
pool of this process; `auto` and host:port join a cluster that is there, on which es_cookbook has to
be installed and the model has to be found under the same name. Output of the engines' processes is
in Ray's log directory (`/tmp/ray/session_latest/logs` of each machine) and nowhere else.

This is the only module that imports Ray.
"""

import asyncio
import os
import pickle
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, cast

from es_cookbook.common.errors import ConfigError, EngineError, first_line, importing, with_class
from es_cookbook.common.machine.cores import SHARE
from es_cookbook.engines.ray.actor import EngineActor

_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File in which Ray notes the cluster last started on this machine."""
_SECONDS_TO_CONNECT = 5.0
_SECONDS_TO_CLOSE = 10.0
_CPUS_OF_OUR_OWN = 0.001
_OBJECT_STORE_BYTES = 256 << 20
"""Object store of a private Ray: batches of prompts are the largest objects in it."""
# Ray reads these when it is imported; what the user has set stays.
_QUIET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed"}
_PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Listen on 127.0.0.1 only, as Ray does on Windows and macOS by itself."""


class ActorLostError(EngineError):
    """An engine's process that died, hung or could not be started."""


Place: TypeAlias = tuple[object, int]
"""Reserved room for one engine: one of Ray's placement groups, and the bundle's index."""


class Cluster:
    """A Ray cluster that this process has joined, which it can do only once: pools share it.

    Args:
        strategy: placement of engines that are reserved together.
        env: environment variables of their processes.

    Attributes:
        is_private: it was started here, and has what this machine has.
        num_cpus: cores of one engine, and so its threads.
        share: one engine's share of the machine in a private Ray; None: the share of its threads.
        num_gpus: GPUs of one engine, or a share of one.
    """

    num_cpus = 1.0
    share: float | None = None
    num_gpus = 0.0

    _lock: ClassVar = threading.Lock()
    _address: ClassVar[str | None] = None  # to which the first pool connected, if one did
    _sharing: ClassVar["set[Cluster]"] = set()

    def __init__(
        self, ray: ModuleType, strategy: str, env: Mapping[str, str], *, is_private: bool
    ) -> None:
        self.is_private = is_private
        self._strategy, self._env = strategy, env
        self._ray = ray
        self._groups: list[object] = []

    @classmethod
    def connect(cls, address: str, strategy: str, env: Mapping[str, str]) -> "Cluster":
        """Start a private Ray or join a cluster; a Ray that this process already uses is shared.

        Takes some seconds and blocks: Ray's processes end with the thread that starts them (Linux's
        PR_SET_PDEATHSIG), so no worker thread can do it.

        Raises:
            ConfigError: Ray is not installed, or nothing answers at the address.
        """
        for name, value in (_QUIET | (_PRIVATE if address == "local" else {})).items():
            os.environ.setdefault(name, value)
        with importing("engine=ray", "ray>=2.50", "ray"):
            import ray  # pyright: ignore[reportMissingImports]
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address == "local":
            options |= {
                "include_dashboard": False,
                "num_cpus": 1,  # For each of them Ray would start an idle process.
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
        with cls._lock:
            if not ray.is_initialized():
                if address != "local":
                    _check_reachable(address)
                try:
                    ray.init(address=address, **options)
                except (ConnectionError, OSError, RuntimeError, ValueError) as error:
                    raise _unreachable(address, first_line(error)) from error
                Cluster._address = address
            cluster = cls(ray, strategy, env, is_private=cls._address == "local")
            if cls._address is not None:
                cls._sharing.add(cluster)
        return cluster

    def resources(self) -> dict[str, float]:
        """Return the resources of the cluster, in use or not: `CPU`, `GPU` and more."""
        return dict(self._ray.cluster_resources())

    async def reserve(self, count: int) -> list[Place]:
        """Wait until there is room for engines, all of them together."""
        bundle = {"CPU": self._cpus, "GPU": self.num_gpus}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        group = self._ray.util.placement_group([bundle] * count, strategy=self._strategy)
        try:
            while not await asyncio.to_thread(group.wait, 1):
                pass
        except BaseException:
            self._ray.util.remove_placement_group(group)
            raise
        self._groups.append(group)
        return [(group, index) for index in range(count)]

    def release(self, places: Sequence[Place]) -> None:
        """Give back places that were reserved together."""
        for group in {group for group, _ in places}:
            self._groups.remove(group)
            self._ray.util.remove_placement_group(group)

    def start(self, place: Place) -> "Actor":
        """Start a process in a place; whether it failed shows in the first call."""
        strategies = self._ray.util.scheduling_strategies
        strategy = strategies.PlacementGroupSchedulingStrategy(*place)
        variables = {"OMP_NUM_THREADS": str(max(1, int(self.num_cpus)))}
        if self.share is not None:
            variables[SHARE] = str(self.share)
        handle = (
            self._ray.remote(EngineActor)
            .options(
                num_cpus=self._cpus,
                num_gpus=self.num_gpus,
                scheduling_strategy=strategy,
                max_restarts=0,  # The pool restarts an engine: only it knows where the engine was.
                enable_task_events=False,  # The head would keep 100,000 calls, 4 KB each.
                runtime_env={"env_vars": {**variables, **self._env}},
            )
            .remote()
        )
        return Actor(self._ray, handle)

    @property
    def _cpus(self) -> float:
        """CPUs that Ray counts: nearly none in a private Ray, whose cores nothing else shares."""
        return _CPUS_OF_OUR_OWN if self.is_private else self.num_cpus

    async def close(self) -> None:
        """Give the places back; the last pool leaves the cluster, and a private one ends."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups.clear()
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        with self._lock:
            if self in self._sharing:
                self._sharing.remove(self)
                if not self._sharing:
                    Cluster._address = None
                    self._ray.shutdown()


class Actor:
    """A process of the cluster with an `EngineActor` in it."""

    def __init__(self, ray: ModuleType, handle: object) -> None:
        self._ray = ray
        self._handle = handle
        self._call = cast("Callable[..., Awaitable[bytes]]", cast(Any, handle).call.remote)

    async def call(self, method: str, *arguments: object, timeout: float | None) -> object:
        """Run a method of `EngineActor`, for at most `timeout` seconds. Returns its result.

        Raises:
            ActorLostError: The process died.
            TimeoutError: It took too long.
            Exception: What the method raised.
        """
        try:
            async with asyncio.timeout(timeout):
                reply = await self._call(method, *arguments)
        except self._ray.exceptions.RayError as error:
            raise ActorLostError(_reason(error)) from None
        was_done, outcome = pickle.loads(reply)
        if not was_done:
            raise outcome
        return outcome

    def send(self, method: str, *arguments: object) -> None:
        """Have a method run without waiting for it; whether it failed shows in the next call."""
        with suppress(self._ray.exceptions.RayError):
            self._call(method, *arguments)

    async def close(self) -> None:
        """Close the engine, then end the process, even if closing fails."""
        try:
            with suppress(EngineError, TimeoutError):
                await self.call("close", timeout=_SECONDS_TO_CLOSE)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process at once, if there is one."""
        self._ray.kill(self._handle)


def _check_reachable(address: str) -> None:
    """Try the address; Ray itself would try for minutes, and noisily."""
    target = address
    if address == "auto":
        noted = _CURRENT_CLUSTER.read_text().strip() if _CURRENT_CLUSTER.exists() else ""
        target = os.environ.get("RAY_ADDRESS") or noted
        if not target:
            return  # Ray looks for a cluster among the processes of this machine, and is quick.
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, ValueError) as error:
        where = address if target == address else f"{address} ({target})"
        raise _unreachable(where, str(error)) from error


def _unreachable(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"engine.address={address}: no Ray cluster can be used there ({reason.rstrip('.')}); start "
        "one with `ray start --head`, give the host:port of one, or engine.address=local for a "
        "Ray of one's own"
    )


def _reason(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # Raised around our own code, as by an import that fails.
        return with_class(cause)
    said = first_line(error).rstrip(".")
    if said == "The actor died unexpectedly before finishing this task":
        return "its process died"
    return f"its process is gone: {said}"
