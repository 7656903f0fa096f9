"""The lock of a run directory: one writer at a time, and others can read who it is.

The lock is the operating system's (`flock` on the file `lock`), so it is released when its process
ends, for whatever reason: no process id has to be checked. The file's text only names the owner,
and the file is deleted on a normal end.

Special cases:

- A text left behind by a process of this machine is taken over: that process has ended.
- A text left behind on another machine is respected. On NFS a lock is valid between machines, but
  some network file systems, or mounts of them, keep it local; then a run on the other machine may
  still be in progress, unseen. The error names the file to delete if it is not.
- Where the file system (or the operating system) has no locks, the file itself is the lock. Only
  one process can create it, but a killed one leaves it behind, to be deleted by hand.

filelock locks the descriptor. Its `FileLock` names no owner, keeps the file, and cannot tell a lock
left on another machine from one of this machine, so the rest is ours.

A machine is identified by its boot id, which its containers share, or by its name.
"""

import contextlib
import datetime
import errno
import json
import logging
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

from es_cookbook.common.errors import RunDirectoryError
from es_cookbook.common.files import opened, opened_descriptor
from es_cookbook.runs.files import cannot

LOCK = "lock"
_LARGEST = 4096
"""Bytes of the file."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}

logger = logging.getLogger(__name__)


class _Owner(NamedTuple):
    """The owner of a lock, as named in its file.

    `boot` is its machine's boot id, or empty; `began` tells its process from a later one with the
    same id, and is empty where that cannot be told.
    """

    host: str
    boot: str
    pid: int
    since: str
    began: str

    @classmethod
    def this_process(cls) -> "_Owner":
        """The owner that this process would be."""
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        now = datetime.datetime.now().astimezone().isoformat(" ", timespec="seconds")
        return cls(platform.node(), boot, os.getpid(), now, _began(os.getpid()) or "")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class RunLock:
    """The lock of a run directory, held from construction to `release`.

    Args:
        directory: must exist.

    Raises:
        RunDirectoryError: Another process holds it (says who), or it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / LOCK
        self._us = _Owner.this_process()
        try:
            self._descriptor = self._take()
        except RunDirectoryError:
            raise
        except OSError as error:
            raise cannot("write", self._path, error, needed=len(_text(self._us))) from error
        _held.add(self._descriptor)

    def release(self) -> None:
        """Release it; harmless if called twice, or in a forked process."""
        if self._descriptor not in _held or os.getpid() != self._us.pid:
            return
        _held.discard(self._descriptor)
        with contextlib.suppress(OSError):
            self._path.unlink()  # While it is held: who has it open already finds it gone.
        os.close(self._descriptor)
        self._descriptor = -1

    def _take(self) -> int:
        while True:
            descriptor, is_new = self._open()
            try:
                locks = self._flock(descriptor)
                if not locks and not is_new:
                    no_locks = "this file system knows no locks; if that run is over, delete"
                    raise self._refusal(_owner(descriptor), f"{no_locks} {self._path}")
                if not locks or self._still_there(descriptor):
                    self._sign(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # Its owner deleted it, with its end, after we opened it.

    def _open(self) -> tuple[int, bool]:
        """The file's descriptor, and whether it was made just now."""
        while True:
            with contextlib.suppress(FileExistsError):
                return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
            with contextlib.suppress(FileNotFoundError):
                return opened_descriptor(self._path, os.O_RDWR, self._directory), False

    def _flock(self, descriptor: int) -> bool:
        """Lock it; returns whether the file system has locks."""
        if sys.platform == "win32":
            return False
        import filelock  # 40 ms, which every command would wait for.

        try:
            if filelock.lock_descriptor(descriptor, blocking=False):
                return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        raise self._refusal(_owner(descriptor), "wait until that run has ended, or stop it")

    def _still_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _sign(self, descriptor: int) -> None:
        """Name this process in the file, in place of one of this machine that is gone."""
        if left := _owner(descriptor):
            same_boot = left.boot != "" and left.boot == self._us.boot
            if left.host != self._us.host and not same_boot:
                advice = (
                    "another machine, so it cannot be seen from here whether that run is over; if "
                    f"it is, delete {self._path}"
                )
                raise self._refusal(left, advice)
            logger.info("%s: taken over from %s, which is gone", self._path, left)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _text(self._us), 0)
        except OSError:
            self._path.unlink()
            raise

    def _refusal(self, owner: _Owner | None, advice: str) -> RunDirectoryError:
        who = owner or "a process that has only just begun"
        return RunDirectoryError(f"log_path {self._directory} is being written by {who}; {advice}")


def writer_of(directory: Path) -> str | None:
    """Who is writing a run directory, as far as its file tells; nothing is locked to find out.

    A process of this machine counts while it lives; one of another machine counts until its file is
    deleted.
    """
    try:
        with opened(directory / LOCK, _LARGEST, directory) as file:
            owner = _owner(file.fileno())
    except OSError:
        return None
    us = _Owner.this_process()
    if owner is None:
        return None
    if owner.host != us.host and not (owner.boot and owner.boot == us.boot):
        return str(owner)
    return str(owner) if owner.began == _began(owner.pid) else None


def _began(pid: int) -> str | None:
    """When a process began; None where there is none.

    Linux counts from its start, so setting the clock makes no other process of it.
    """
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    import psutil  # 30 ms, which every command would wait for.

    with contextlib.suppress(psutil.Error, OverflowError, ValueError):
        return str(psutil.Process(pid).create_time())
    return None


_held: set[int] = set()
"""Descriptors of the locks of this process."""


def _forget() -> None:
    """In a forked child: a lock belongs to the parent alone, and ends with it."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)


def _text(owner: _Owner) -> bytes:
    return json.dumps(owner._asdict()).encode() + b"\n"


def _owner(descriptor: int) -> _Owner | None:
    """The owner that the file names; None if there is none (yet)."""
    try:
        plain = json.loads(os.pread(descriptor, _LARGEST, 0))
        host, boot, pid, since, began = (str(plain[name]) for name in _Owner._fields)
        return _Owner(host, boot, int(pid), since, began)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
