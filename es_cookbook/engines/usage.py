"""Who may use an engine when: requests together, a change of its weights alone."""

from collections.abc import Generator
from contextlib import contextmanager

from es_cookbook.common.errors import EngineError


class Usage:
    """Lets requests use an engine together, and a change of its weights only alone.

    For the tasks of one event loop.

    Attributes:
        closed: the engine can be used no more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._num_in_flight = 0
        self._change: str | None = None

    @contextmanager
    def request(self) -> Generator[None]:
        """Inside, a request is in flight.

        Raises:
            EngineError: The engine is closed, or being changed.
        """
        self._check()
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    @contextmanager
    def changing(self, what: str) -> Generator[None]:
        """Inside, nobody else may use the engine.

        Args:
            what: what is being done, for example "load genomes".

        Raises:
            EngineError: The engine is closed, being changed, or requests are in flight.
        """
        self._check()
        if self._num_in_flight:
            raise EngineError(f"cannot {what} while {self._num_in_flight} requests are in flight")
        self._change = what
        try:
            yield
        finally:
            self._change = None

    def _check(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")
        if self._change is not None:
            raise EngineError(f"the engine cannot be used while another task has it {self._change}")
