"""Reports to systemd how the agent is: the protocol of sd_notify(3), without a library.

Guarantees: the watchdog is fed from a completed step of the engine and from nowhere else, so a
stuck loop or core misses it and a stuck driver does not. Sending never blocks; without
$NOTIFY_SOCKET nothing is sent.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

from agent.bus import Latest
from agent.model.health import Health
from agent.model.snapshot import RegistrationPhase, Snapshot

EXTEND_EVERY_S: Final = 5.0
EXTEND_BY_S: Final = 30.0


class Notifier:
    """Sends states to the service manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.watchdog_ns = _watchdog_ns(environment)
        """How long the service manager waits for a sign of life; None: it does not."""
        self._fed_ns: int | None = None
        self._status = ""

    def send(self, *lines: str) -> None:
        """Send states in one datagram."""
        if not self._address:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            # A full or vanished socket of the manager is no reason to do anything else.
            return

    def ready(self) -> None:
        """Send that the agent serves, or stands by."""
        self.send("READY=1")

    def reloading(self) -> None:
        """Send that the configuration is being read; ready() ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Send that the agent shuts down."""
        self.send("STOPPING=1")

    def status(self, text: str) -> None:
        """Show a line in ``systemctl status``; the same line is sent once."""
        if text != self._status:
            self._status = text
            self.send(f"STATUS={text}")

    def feed(self, now_ns: int) -> None:
        """Feed the watchdog after a completed step; sends at most every quarter of its time."""
        if self.watchdog_ns is None:
            return
        if self._fed_ns is None or now_ns - self._fed_ns >= self.watchdog_ns // 4:
            self._fed_ns = now_ns
            self.send("WATCHDOG=1")

    async def run(self, latest: Latest[Snapshot]) -> None:
        """Keep the status line true."""
        version = latest.version
        while True:
            self.status(status_line(latest.value))
            version = await latest.wait_newer(version)

    async def extend_start(self, every_s: float = EXTEND_EVERY_S) -> None:
        """Ask for more time to start until cancelled; a driver may take two minutes to initialise."""
        while True:
            self.send(f"EXTEND_TIMEOUT_USEC={round(EXTEND_BY_S * 1e6)}")
            await asyncio.sleep(every_s)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _watchdog_ns(environment: Mapping[str, str]) -> int | None:
    text, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not text.isdigit() or int(text) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(text) * 1000


def status_line(snapshot: Snapshot) -> str:
    """Return the node in one line: ``8 GPUs, 1 unhealthy, registered``."""
    parts = [_counted(len(snapshot.gpus), "GPU")]
    for health in (Health.UNHEALTHY, Health.UNKNOWN):
        number = sum(view.health is health for view in snapshot.gpus)
        if number:
            parts.append(f"{number} {health}")
    if snapshot.driver.ready is not True:
        parts.append("waiting for the driver")
    elif snapshot.resources:
        registered = all(resource.phase is RegistrationPhase.REGISTERED for resource in snapshot.resources)
        parts.append("registered" if registered else "not registered")
    return ", ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
