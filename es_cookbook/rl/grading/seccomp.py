"""System calls that code in the sandbox may not make: a seccomp filter, as bytes.

Namespaces, a lost user and limits on resources leave ways that this closes: the kernel's keyrings
and log, which have no namespace of their own; AF_VSOCK, which reaches the host of a virtual machine
without a network; memory that no address-space limit counts (System V segments, memfds); a look
into another process of the same user; and large parts of the kernel that grading has no need of.
Programs in another ABI of the processor (32 bits, x32) are killed: their numbers mean other calls.

A filter in cBPF, as `bwrap --seccomp` reads it: loads, comparisons, jumps forward and verdicts.
"""

import functools
import platform
import struct

from es_cookbook.common.errors import SandboxError

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # EPERM
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_AF_UNIX = 1
_X32 = 0x40000000

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> (what the kernel calls it, which column of the numbers is its)."""
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
}
_ONLY_UNIX = {"socket": (41, 198), "socketpair": (53, 199)}


@functools.cache
def filter_program(machine: str | None = None) -> bytes:
    """The filter for a machine, this one if None.

    Raises:
        SandboxError: The numbers of its system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        known = " and ".join(sorted(_ARCHITECTURES))
        raise SandboxError(
            f"model-written code runs in a sandbox on {known} alone, found {machine!r}"
        )
    architecture, column = _ARCHITECTURES[machine]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, skip_if=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_step(_AT_LEAST, _X32, skip_else=1), _step(_RETURN, _KILL)]
    for numbers in _REFUSED.values():
        program += [_step(_EQUAL, numbers[column], skip_else=1), _step(_RETURN, _REFUSE)]
    for numbers in _ONLY_UNIX.values():
        program += [
            _step(_EQUAL, numbers[column], skip_else=4),
            _step(_LOAD, _FIRST_ARGUMENT),
            _step(_EQUAL, _AF_UNIX, skip_if=1),
            _step(_RETURN, _REFUSE),
            _step(_RETURN, _ALLOW),
        ]
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, skip_if: int = 0, skip_else: int = 0) -> bytes:
    return struct.pack("=HBBI", code, skip_if, skip_else, value)
