"""A simulated node in the test's own process, and the real agent on it as users run it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.probe.loaded import OBJECT
from agent.simulation.children import environment_of_children, send_signal
from agent.simulation.directory import NodeDirectory
from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.node import DriverWanted, SimulatedNode
from agent.simulation.presets import load_preset
from tests.killed_runs import WITH_US

GPU = "nvidia.com/gpu"
ROOT = Path(__file__).resolve().parents[1]

PATIENCE_S = 60.0
"""How long a test waits for an event that comes at once on an idle machine; a timeout is a failure."""

CASE_FLAGS = {"poll": "200ms", "recovery-clean-probes": "1", "recovery-quiet": "0s"}
"""Short periods: tests count polls, not seconds."""

POLL_NS = 200_000_000
SLACK_NS = 10_000_000_000
"""For a loaded machine; still less than the periods of sources that do not poll."""


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for the names of sockets, which pytest's does not."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as name:
        yield Path(name)


@contextlib.asynccontextmanager
async def simulated_node(
    hardware: str | Mapping[str, object] = "4x-t4",
    *,
    kubelet_present: bool = True,
    driver: DriverWanted = "none",
) -> AsyncIterator[SimulatedNode]:
    """Run a node of a preset, or of an inline mapping as a scenario file has it."""
    with short_directory() as parent, NodeDirectory.hold(parent / "node") as directory:
        spec = load_preset(hardware)
        async with SimulatedNode(directory, spec, kubelet_present=kubelet_present, driver=driver) as node:
            yield node


def why_no_driver_double() -> str | None:
    """Return why there can be no double of the driver's device files here; None: there can."""
    if os.geteuid() != 0:
        return "needs root"
    return None if Path("/dev/fuse").exists() else "/dev/fuse is not there"


class AgentProcess:
    """A process that is, or becomes, ``gpu-agent run``, and the lines of its log."""

    def __init__(self, process: asyncio.subprocess.Process, flags: Mapping[str, str]) -> None:
        self.process = process
        self.flags = flags
        self._log: list[dict[str, Any]] = []
        self._raw: list[str] = []
        self._has_ended = False
        self._grown = asyncio.Condition()
        self._reading = asyncio.get_running_loop().create_task(self._read(), name="test-agent-log")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    @property
    def log(self) -> list[dict[str, Any]]:
        """Return the lines logged so far."""
        return list(self._log)

    @property
    def sentences(self) -> list[str]:
        """Return the lines of standard error that are no log lines: what is written for people."""
        return [line for line in self._raw if not line.startswith("{")]

    @property
    def text(self) -> str:
        """Return everything written to standard error so far."""
        return "\n".join(self._raw)

    @property
    def events(self) -> list[str]:
        """Return the event of each log line, or its message if it has none."""
        return [line.get("event", line["message"]) for line in self._log]

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip("\n")
            self._raw.append(line)
            with contextlib.suppress(ValueError):
                self._log.append(json.loads(line))
            await self._wake()
        self._has_ended = True
        await self._wake()

    async def _wake(self) -> None:
        async with self._grown:
            self._grown.notify_all()

    async def wait_logged(
        self, predicate: Callable[[dict[str, Any]], bool], *, count: int = 1
    ) -> dict[str, Any]:
        """Wait for the n-th such line of the log."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S), self._grown:
                while True:
                    found = [line for line in self._log if predicate(line)]
                    if len(found) >= count:
                        return found[count - 1]
                    if self._has_ended:
                        break
                    await self._grown.wait()
        raise AssertionError(f"The line was not logged; the agent logged:\n{self.text}")

    async def wait_line(self, message: str, *, count: int = 1, **fields: object) -> dict[str, Any]:
        """Wait for the n-th log line with this event, or this start of its message, and these fields."""
        return await self.wait_logged(
            lambda line: is_about(line, message) and all(line.get(name) == fields[name] for name in fields),
            count=count,
        )

    async def wait_registered(self, count: int = 1) -> None:
        """Wait for a registration."""
        await self.wait_line("Registered with the kubelet", count=count)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit; returns the exit status."""
        if self.process.returncode is None:
            self.signal(number)
        return await self.ended()

    def signal(self, number: int) -> None:
        """Send a signal."""
        send_signal(self.process, number)

    async def ended(self) -> int:
        """Wait for the exit and for the last line; returns the exit status."""
        async with asyncio.timeout(PATIENCE_S):
            status = await self.process.wait()
            await asyncio.wait((self._reading,))
        return status

    async def get(self, path: str) -> tuple[int, Any]:
        """Return the answer of the control socket: status and JSON, or text if it is none."""
        reader, writer = await asyncio.open_unix_connection(self.flags["control-socket"])
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            answer = await reader.read()
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        try:
            return int(head.split()[1]), json.loads(body)
        except ValueError:
            return int(head.split()[1]), body.decode()

    async def wait_answer(self, path: str, wanted: Callable[[int, Any], bool]) -> Any:
        """Poll until the answer is the wanted one, since HTTP notifies no client of a change."""
        last: tuple[int, Any] | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(OSError, IndexError):
                        last = await self.get(path)
                        if wanted(*last):
                            return last[1]
                    await asyncio.sleep(0.02)
        raise AssertionError(f"{path} answered last {last}; the agent logged:\n{self.text}")


def is_about(line: Mapping[str, Any], message: str) -> bool:
    """Return whether a log line is of an event, or its message begins so."""
    return bool(line.get("event") == message or line["message"].startswith(message))


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str], flags: Mapping[str, str], environment: Mapping[str, str]
) -> AsyncIterator[AgentProcess]:
    """Start what becomes the agent, with the variables that configure one only if they are given here.

    It is killed when the context or this process ends.
    """
    process = await asyncio.create_subprocess_exec(
        *(*WITH_US, *command),
        cwd=ROOT,
        env=clean_environment() | dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=1024 * 1024,
        process_group=0,
    )
    agent = AgentProcess(process, flags)
    try:
        yield agent
    except BaseException as error:
        shown = "\n".join(line[:300] for line in agent.text.splitlines()[-60:])
        error.add_note(f"The agent (exit status {process.returncode}) logged:\n{shown}")
        raise
    finally:
        if process.returncode is None:
            send_signal(process, signal.SIGKILL)
        await agent.ended()


@contextlib.asynccontextmanager
async def running(
    flags: Mapping[str, str],
    *,
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
    prelude: str = "",
) -> AsyncIterator[AgentProcess]:
    """Run an agent. ``prelude`` is Python to run before it, ``launcher`` what has to become it."""
    given = (f"--{name}={value}" for name, value in flags.items())
    command = (*launcher, *interpreter(prelude), "run", *given)
    async with started(command, flags, environment or {}) as agent:
        yield agent


def interpreter(prelude: str = "") -> tuple[str, ...]:
    """Return the command line of ``gpu-agent``, and of Python before it."""
    if not prelude:
        return (sys.executable, "-m", "agent")
    code = f"{prelude}\nimport sys\nfrom agent.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    return (sys.executable, "-c", code)


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables that configure an agent."""
    from agent.config.options import OPTIONS  # noqa: PLC0415 - most tests need none of it

    ours = {name for option in OPTIONS.values() for name in option.variables} | {"GPU_AGENT_SIM_STATE"}
    return environment_of_children(os.environ, sorted(ours))


def flags_of(node: SimulatedNode, **flags: str) -> dict[str, str]:
    """Return the flags of an agent on a simulated node, with HTTP at a port of its own."""
    usual = node.directory.agent_flags() | {"http-listen": "127.0.0.1:0", "log-format": "json"}
    if not node.has_driver:
        # The probe could see nothing, and loading it costs seconds of CPU time.
        usual["probe-tier"] = "off"
    elif OBJECT.exists():
        usual["probe-loader"] = "core"  # and this one a fraction of that
    return usual | {name.replace("_", "-"): value for name, value in flags.items()}


@contextlib.asynccontextmanager
async def agent_process(
    node: SimulatedNode,
    environment: Mapping[str, str] | None = None,
    /,
    *,
    launcher: Sequence[str] = (),
    **flags: str | None,
) -> AsyncIterator[AgentProcess]:
    """Run an agent with short periods; a flag's name has underscores, and one that is None is omitted."""
    asked = {name.replace("_", "-"): value for name, value in flags.items()}
    usual = flags_of(node) | {"http-listen": ""} | CASE_FLAGS
    given = {name: value for name, value in (usual | asked).items() if value is not None}
    async with running(given, environment=environment, launcher=launcher) as agent:
        yield agent


async def wait_allocatable(
    kubelet: EmulatedKubelet, allocatable: int, *, capacity: int | None = None, resource: str = GPU
) -> None:
    """Wait until the kubelet has so many allocatable devices."""
    await kubelet.wait_for(
        lambda seen: (
            seen.allocatable(resource) == allocatable and capacity in (None, seen.capacity(resource))
        ),
        PATIENCE_S,
    )


async def nothing_more(
    kubelet: EmulatedKubelet, happened: Callable[[EmulatedKubelet], bool], seconds: float
) -> None:
    """Fail if the kubelet has an event within so many seconds."""
    with contextlib.suppress(TimeoutError):
        await kubelet.wait_for(happened, seconds)
        raise AssertionError(f"it happened: {kubelet.describe()}")


async def wait_polls(node: SimulatedNode, count: int) -> None:
    """Wait until the agent has listed the GPUs so many times more; the simulated NVML only counts calls."""
    until = node.nvml.calls("nvmlDeviceGetCount") + count
    async with asyncio.timeout(PATIENCE_S):
        while node.nvml.calls("nvmlDeviceGetCount") < until:
            await asyncio.sleep(0.02)


def processes_with(text: str) -> dict[int, str]:
    """Return the processes whose command line holds a text."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if text in line and int(entry.name) != os.getpid():
                    found[int(entry.name)] = line
    return found


async def wait_gone(node_dir: Path) -> None:
    """Wait until no process of a node is left, nor its directory; the exit of orphans raises no event."""
    async with asyncio.timeout(PATIENCE_S):
        while processes_with(str(node_dir)) or node_dir.exists():
            await asyncio.sleep(0.02)


def accepted(kubelet: EmulatedKubelet, resource: str = GPU) -> int:
    """Count the registrations of a resource that the kubelet accepted."""
    return sum(each.accepted and each.resource == resource for each in kubelet.registrations)


def uuids(node: SimulatedNode) -> list[str]:
    """Return the UUIDs of the node's GPUs by index."""
    return [node.nvml.uuid(index) for index in range(node.nvml.gpus)]


def codes(preflight: Mapping[str, Any]) -> set[str]:
    """Return the reason codes of a preflight answer."""
    return {reason["code"] for reason in preflight["reasons"]}


@dataclass
class Command:
    """Output of a command, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Return the JSON lines of standard output."""
        return [json.loads(line) for line in self.out.splitlines()]


@contextlib.asynccontextmanager
async def running_command(
    *arguments: str, environment: Mapping[str, str] | None = None, launcher: tuple[str, ...] = ()
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command and read its output; ``launcher`` is put before it.

    It is killed when the context or this process ends.
    """
    process = await asyncio.create_subprocess_exec(
        *(*WITH_US, *launcher, *interpreter()),
        *arguments,
        cwd=ROOT,
        env={**clean_environment(), **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            send_signal(process, signal.SIGKILL)
        await process.communicate()


async def gpu_agent(
    *arguments: str, environment: Mapping[str, str] | None = None, launcher: tuple[str, ...] = ()
) -> Command:
    """Run a command until it exits; ``launcher`` is put before it."""
    started = running_command(*arguments, environment=environment, launcher=launcher)
    async with started as process, asyncio.timeout(120):
        out, err = await process.communicate()
    return Command(process.returncode or 0, out.decode(), err.decode())


async def play_scenario(name: str, node_dir: Path) -> Command:
    """Play a scenario to its end; it must succeed and leave no process and no file."""
    result = await gpu_agent("demo", f"--scenario={name}", "--json", f"--node-dir={node_dir}")
    assert (result.status, result.err) == (0, ""), result.err
    assert not node_dir.exists()
    assert not processes_with(str(node_dir))
    return result
