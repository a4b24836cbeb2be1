"""A process that serves eight GPUs, the last one unhealthy: python -m tests.sinks.plugin_process DIR [all].

With ``all`` containers get their devices by every strategy at once.

Attacks are aimed at it, so that its memory, file descriptors and log lines are its own.
"""

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from agent import log
from agent.bus import Inbox, Latest
from agent.model.effects import RegisterResource
from agent.model.facts import Fact
from agent.model.policy import Injection, Policy
from agent.model.structs import replace
from agent.sinks.plugin.sink import DevicePlugin
from tests.killed_runs import WITH_US
from tests.sinks.snapshots import GPU, devices, snapshot
from tests.sinks.snapshots import resource as advertised

REPOSITORY = Path(__file__).parents[2]
PAGE_BYTES = resource.getpagesize()


class PluginProcess:
    """The process as its attackers see it."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self._process = process
        self.socket = directory / "nvidia-gpu.sock"
        self._log = directory / "stderr"

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def open_files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self._process.pid}/fd").iterdir())

    def log_lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def exhaust(self) -> None:
        """Leave it one file descriptor."""
        self._order(signal.SIGUSR1)

    def give_back(self) -> None:
        """Let it have them again."""
        self._order(signal.SIGUSR2)

    def _order(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"done\n"


@contextmanager
def plugin_process(directory: Path, *arguments: str) -> Iterator[PluginProcess]:
    """Start the process, wait until it serves, and end it."""
    with (directory / "stderr").open("wb") as lines:
        process = subprocess.Popen(
            [*WITH_US, sys.executable, "-m", "tests.sinks.plugin_process", str(directory), *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=lines,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n", (directory / "stderr").read_text()
        yield PluginProcess(process, directory)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Resolved:
    """Spec files that resolve every name."""

    absent: frozenset[str] = frozenset()

    async def settle(self) -> None:
        """Nothing is being written."""

    def missing(self, names: Sequence[str]) -> str | None:
        return None


EVERY_STRATEGY = Injection(
    strategies=("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"), pass_device_specs=True
)


async def serve(directory: Path, *, injection: Injection) -> None:
    loop = asyncio.get_running_loop()
    inbox: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
    state = snapshot(advertised(devices(8, unhealthy=[7])))
    plugin = DevicePlugin(
        inbox=inbox,
        latest=Latest(replace(state, policy=Policy(injection=injection, pre_start_check=True))),
        cdi=Resolved(),
        kubelet_socket=directory / "kubelet.sock",
        clock=time.monotonic_ns,
    )
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    exhausted: list[int] = []
    loop.add_signal_handler(signal.SIGUSR1, _exhaust, exhausted)
    loop.add_signal_handler(signal.SIGUSR2, _give_back, exhausted)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(plugin.run())
        plugin.register(RegisterResource(GPU, 1, None))
        while not (directory / "nvidia-gpu.sock").exists():
            await asyncio.sleep(0.001)
        gc.freeze()
        _print("serving")
        await stop.wait()
        await plugin.drain(1.0)


def _exhaust(descriptors: list[int]) -> None:
    """Open every file descriptor there is but one."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with suppress(OSError):
        while True:
            descriptors.append(os.open("/dev/null", os.O_RDONLY))
    os.close(descriptors.pop())
    _print("done")


def _give_back(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
    _print("done")


def _print(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    log.set_up("json", "info")
    plain = Injection(pass_device_specs=True)
    asyncio.run(serve(Path(sys.argv[1]), injection=EVERY_STRATEGY if sys.argv[2:] == ["all"] else plain))
