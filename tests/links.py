"""Two hosts on one machine, in network namespaces of their own, and a link between them.

The link is slow or cut at will. A process that has a TUN device in each namespace carries packets
from one to the other, after the time that they take at the link's rate and its delay; while the
link is cut they are lost. So all above is real: the kernel's TCP, retransmissions, ports. Linux's
own shaper, netem, is not in every kernel, and knows no cut that a test could time.

`inside` is the command that runs a program in namespaces of its own: network, so that it sees
nothing but the two hosts; processes, which end with it; mounts, with a /tmp/ray of its own. It
needs root, or a Linux that lets users make namespaces: `refusal` says why not.
"""

import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from multiprocessing.sharedctypes import RawArray

HERE, THERE = "10.77.0.1", "10.77.0.2"
_QUEUE = 256 << 10
"""Bytes that wait at the slow end of a link before packets are lost, as in a router."""
_ATTACH, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_SET_UP = "ip link set lo up && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray"
_RATE, _DELAY, _SENT = 0, 1, 2


def inside(*command: str) -> list[str]:
    """A command, run by `unshare` where there is nothing but what it makes itself."""
    return [
        "unshare",
        *_NAMESPACES,
        "--map-root-user",
        "sh",
        "-c",
        f'{_SET_UP} && exec "$@"',
        "sh",
        *command,
    ]


def refusal() -> str | None:
    """Why namespaces and a link cannot be made here, in one line; None if they can."""
    try:
        ready = inside(sys.executable, "-c", "from tests.links import Link; Link()")
        done = subprocess.run(ready, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return (done.stderr.strip() or "failed").splitlines()[-1] if done.returncode else None


class Link:
    """Hosts `HERE`, the namespace of this process, and `THERE`, joined by a link.

    The link is quick until it is told otherwise.
    """

    def __init__(self) -> None:
        self._there = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._there.pid}/ns/net") == ours:
            time.sleep(0.001)
        devices = [_tun("here"), _tun("there")]
        _run(["ip", "link", "set", "there", "netns", str(self._there.pid)])
        for words, name, own, other in (
            ([], "here", HERE, THERE),
            (self.there(), "there", THERE, HERE),
        ):
            _run([*words, "ip", "link", "set", "lo", "up"])
            _run([*words, "ip", "address", "add", own, "peer", other, "dev", name])
            _run([*words, "ip", "link", "set", name, "up"])
        self._state = RawArray("d", [float("inf"), 0.0, 0.0, 0.0])
        carrying = multiprocessing.get_context("fork").Process(
            target=_carry, args=(devices, self._state), daemon=True
        )
        carrying.start()

    def there(self, *command: str) -> list[str]:
        """A command as it is run on the host `THERE`."""
        return ["nsenter", f"--net=/proc/{self._there.pid}/ns/net", *command]

    def set(self, bits_per_second: float = float("inf"), round_trip: float = 0.0) -> None:
        """How quick it is from now on: at 0 bits a second it is cut."""
        self._state[_RATE], self._state[_DELAY] = bits_per_second, round_trip / 2

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes of IP packets from `HERE` to `THERE`, and back, since the link was made."""
        return self._state[_SENT], self._state[_SENT + 1]


def _carry(devices: list[int], state: "RawArray[float]") -> None:  # pyright: ignore
    """Carry packets; ends with the process that made the link."""
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free_at = [0.0, 0.0]
    while True:
        next_due = min((queue[0][0] for queue in waiting if queue), default=float("inf"))
        patience = max(0.0, min(next_due - time.monotonic(), 0.1))
        readable, _, _ = select.select(devices, [], [], patience)
        now = time.monotonic()
        rate, delay = state[_RATE], state[_DELAY]
        for device in readable:
            packet, i = os.read(device, 1 << 16), devices.index(device)
            is_ip4 = packet[0] >> 4 == 4
            backlog = max(0.0, free_at[i] - now) * rate / 8 if rate < float("inf") else 0.0
            if rate and is_ip4 and backlog <= _QUEUE:
                state[_SENT + i] += len(packet)
                free_at[i] = max(free_at[i], now) + 8 * len(packet) / rate
                waiting[i].append((free_at[i] + delay, packet))
        for i, queue in enumerate(waiting):
            if not rate:
                queue.clear()
                free_at[i] = 0.0
            while queue and queue[0][0] <= now:
                os.write(devices[1 - i], queue.popleft()[1])


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _ATTACH, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    return device


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)
