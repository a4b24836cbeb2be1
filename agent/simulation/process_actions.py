"""What processes can do to the GPUs of a simulated node, as an action, and how the driver's files answer.

Guarantees as in ``actions``. Both need the driver double, which a node has where it was asked for.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.config.values import duration_from
from agent.core.wording import counted
from agent.errors import UsageError
from agent.simulation.action_table import action, choice, name_text, parameter, whole_number
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.gpu_processes.node_processes import DEFAULT_MEMORY_MIB, NodeProcess
from agent.simulation.kernel_actions import node_name

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

MAX_CONTEXTS: Final = 1_000
"""Of one command."""
MAX_COMM: Final = 15
"""Source: proc(5), /proc/PID/comm."""

PROCESS: Final = "process"
_COMMANDS: Final = (
    *("start", "create", "leak", "free", "fork", "give", "dup", "close", "close-range", "exec", "exit"),
    *("stop", "kill"),
)
_ON_A_GPU: Final = frozenset({"start", "create", "leak", "free"})
_ONLY: Final = {
    "pod": {"start"},
    "comm": {"start"},
    "memory": {"start"},
    "gi": {"start"},
    "ci": {"start"},
    "every": {"leak"},
    "to": {"fork", "give"},
    "gpu": _ON_A_GPU,
    "contexts": _ON_A_GPU,
}
"""Which commands accept a parameter."""

_INSTANCE: Final = whole_number(0, 254)


def _comm(text: str) -> str:
    if not text or not text.isprintable() or len(text.encode()) > MAX_COMM:
        raise ValueError(f"must have 1 to {MAX_COMM} bytes")
    return text


def _pod(text: str) -> str:
    namespace, slash, name = name_text(text).partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise ValueError("must be a namespace and a name with a slash between them")
    return text


def _seconds(text: str) -> float:
    return duration_from(text) / 1e9


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """Start a process that uses a GPU, or have one create, leak, hand over or free contexts, or exit.

    After exit and kill nothing was freed by the process itself; after stop everything was. The child of a
    fork, and the process that is given files, keep what is on the GPU alive.
    """

    command: str = parameter("COMMAND", ", ".join(_COMMANDS), choice(*_COMMANDS))
    name: str = parameter("NAME", "What the process is called here", name_text)
    gpu: str | None = parameter(
        "GPU", "Position or UUID; the one it was started on is the default", name_text, default=None
    )
    contexts: int | None = parameter(
        "N", "How many; 1 by default, to free all", whole_number(0, MAX_CONTEXTS), default=None
    )
    pod: str | None = parameter("NAMESPACE/NAME", "A pod that runs; none by default", _pod, default=None)
    comm: str | None = parameter("NAME", "What the kernel calls it, if not NAME", _comm, default=None)
    memory: int | None = parameter(
        "MIB", f"Of each context, {DEFAULT_MEMORY_MIB} by default", whole_number(0, 1 << 20), default=None
    )
    gi: int | None = parameter("N", "GPU instance it runs on", _INSTANCE, default=None)
    ci: int | None = parameter("N", "Compute instance it runs on", _INSTANCE, default=None)
    every: float | None = parameter(
        "TIME", "Between the contexts of a leak, 1s by default", _seconds, default=None
    )
    to: str | None = parameter(
        "NAME", "The child of a fork, or the process that is given the files", name_text, default=None
    )

    def __post_init__(self) -> None:
        for name, commands in _ONLY.items():
            if getattr(self, name) is not None and self.command not in commands:
                raise ValueError(f"accepts no {name} for {self.command}")
        if self.to is None and self.command in _ONLY["to"]:
            raise ValueError(f"needs the parameter to for {self.command}")
        if self.gpu is None and self.command == "start":
            raise ValueError("needs gpu for start")
        if (self.gi is None) != (self.ci is None):
            raise ValueError("needs both gi and ci, or neither")

    async def apply(self, node: "SimulatedNode") -> str:
        """Apply the command, and make NVML agree."""
        if self.command == "start":
            return await self._start(node)
        owner = node.processes.get(self.name)
        done = await self._execute(node, owner)
        await node.processes.agree()
        return done

    async def _start(self, node: "SimulatedNode") -> str:
        position = node.position(self.gpu or "")
        started = await node.processes.start(
            self.name,
            [position],
            contexts=1 if self.contexts is None else self.contexts,
            comm=self.comm,
            pod=self.pod,
            memory_mib=DEFAULT_MEMORY_MIB if self.memory is None else self.memory,
            gi=self.gi,
            ci=self.ci,
        )
        where = f" of pod {self.pod}" if self.pod else ""
        return f"{started.title}{where} runs on {node.gpu_name(position)}"

    async def _execute(self, node: "SimulatedNode", owner: NodeProcess) -> str:
        match self.command:
            case "create" | "leak" | "free":
                return await self._change(node, owner)
            case "fork":
                child = await node.processes.fork(owner, self.to or "")
                return f"{owner.title} forked; the child is {child.title.lower()}"
            case "give":
                other = node.processes.get(self.to or "")
                await owner.process.give(other.process)
                return f"{owner.title} gave its files to {other.title.lower()}"
            case "exit" | "stop" | "kill" | "exec" as command:
                executed: dict[str, tuple[Callable[[], Awaitable[None]], str]] = {
                    "exit": (owner.process.exit, "exited and freed nothing"),
                    "stop": (owner.process.stop, "freed everything and exited"),
                    "kill": (owner.process.kill, "was killed"),
                    "exec": (owner.process.exec, "became another program"),
                }
                act, done = executed[command]
                await act()
                return f"{owner.title} {done}"
            case _:
                await owner.process.command(self.command)
                return f"{owner.title} did {self.command}"

    async def _change(self, node: "SimulatedNode", owner: NodeProcess) -> str:
        position = owner.positions[0] if self.gpu is None else node.position(self.gpu)
        number = 1 if self.contexts is None else self.contexts
        where = node.gpu_name(position)
        if self.command == "free":
            freed = await owner.process.destroy(
                None if self.contexts is None else self.contexts, minor=node.spec.gpus[position].minor
            )
            return f"{owner.title} destroyed {counted(freed, 'context')} on {where}"
        if self.command == "leak":
            every_s = 1.0 if self.every is None else self.every
            await node.processes.leak(owner, position, number, every_s)
            return (
                f"{owner.title} creates {counted(number, 'context')} on {where}, one every {every_s:g} s,"
                " and frees none"
            )
        await node.processes.create(owner, position, number)
        return f"{owner.title} created {counted(number, 'context')} on {where}"


@dataclass(frozen=True, slots=True)
class HoldNode:
    """Let no call on a device node return: the caller is held in the kernel until release-node."""

    name: str = parameter("NODE", "Such as nvidia3 or nvidiactl", node_name)

    async def apply(self, node: "SimulatedNode") -> str:
        """Hold."""
        await _known(node.driver, self.name).hold(self.name)
        return f"Calls on /dev/{self.name} do not return"


@dataclass(frozen=True, slots=True)
class SlowNode:
    """Let the driver answer late on a device node."""

    name: str = parameter("NODE", "Such as nvidia3 or nvidiactl", node_name)
    by: float = parameter("TIME", "How late, such as 2s", _seconds)

    async def apply(self, node: "SimulatedNode") -> str:
        """Delay."""
        await _known(node.driver, self.name).slow(self.name, int(self.by * 1e9))
        return f"Calls on /dev/{self.name} return after {self.by:g} s"


@dataclass(frozen=True, slots=True)
class ReleaseNode:
    """Let the driver answer at once on a device node again, also what waits."""

    name: str = parameter("NODE", "Such as nvidia3 or nvidiactl", node_name)

    async def apply(self, node: "SimulatedNode") -> str:
        """Answer."""
        await _known(node.driver, self.name).release(self.name)
        return f"Calls on /dev/{self.name} return"


def _known(driver: DriverDouble, name: str) -> DriverDouble:
    if name not in driver.names:
        raise UsageError(f"The simulated driver has no node {name}; it has {', '.join(driver.names)}")
    return driver


PROCESS_ACTIONS: Final = (
    action(ProcessCommand, PROCESS, "command"),
    action(HoldNode, "hold-node", "name"),
    action(SlowNode, "slow-node", "name"),
    action(ReleaseNode, "release-node", "name"),
)
NEED_DRIVER: Final = frozenset(row.name for row in PROCESS_ACTIONS)
"""Actions for which a node needs the driver double."""
