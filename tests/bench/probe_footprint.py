"""S7 and S8 with the probe in the kernel: memory of the agent and at its start, CPU with many processes."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from agent.commands.client import AgentClient
from agent.errors import AgentError, AgentUnreachableError
from agent.threads import in_daemon_thread
from tests.bench.figures import Absent, Effort, Figure, MeasurementError
from tests.bench.memory_cgroup import memory_cgroup
from tests.bench.node import (
    SETTLE_S,
    BenchNode,
    MeasuredAgent,
    bench_node,
    free_port,
    share_of_core,
)
from tests.bench.probe_load import LOADERS, Loader, Tools
from tests.bench.scrape import scrape

_MIB: Final = 1024 * 1024
_RSS_MIB: Final = 64
_HIGHEST_MIB: Final[dict[Loader, float | None]] = {"core": 80, "bcc": None}
"""The compiler takes what it takes, once, in a process that ends."""
_PROCESSES: Final = 1_000
_CPU_PERCENT: Final = 1.0
"""Twice what is promised of an idle agent."""
_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.05
_SAMPLE_S: Final = 0.005
_JOINING: Final = ("sh", "-c", 'echo $$ >"$0" && exec "$@"')
"""Joins a cgroup, whose file follows, and becomes the command after it."""


async def memory(_effort: Effort) -> AsyncGenerator[Figure | Absent, None]:
    """Read VmRSS of an agent with everything on, uevents too, and its probe attached to a driver double.

    ``highest`` is the most that the agent and its loader took together at one moment since the start. With
    ``sampled`` in its name it was read every few milliseconds: the memory of both, and the pages of files of
    the one that has more of them, since most are the same files' and count once. With ``cgroup`` the kernel
    counted it in a cgroup of their own, where one can be had, as for a unit's limit: its own memory for the
    two is in it, most of it the probe's maps, and of files only what no process had read before.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        kinds = ("rss_probe", "highest_sampled_probe", "highest_cgroup_probe")
        names = [f"S7.{kind}_{loader}" for loader in LOADERS for kind in kinds]
        try:
            tools = Tools(Path(folder))
        except MeasurementError as error:
            for name in names:
                yield Absent(name, str(error))
            return
        for loader in LOADERS:
            if why := tools.why_not(loader):
                for name in names:
                    if name.endswith(loader):
                        yield Absent(name, why)
                continue
            rss, sampled, counted = await _memory_with(loader)
            target = _HIGHEST_MIB[loader]
            yield Figure(f"S7.rss_probe_{loader}", rss / _MIB, "MiB", _RSS_MIB)
            yield Figure(f"S7.highest_sampled_probe_{loader}", sampled / _MIB, "MiB", target)
            if counted is None:
                yield Absent(f"S7.highest_cgroup_probe_{loader}", "no cgroup that counts memory can be had")
            else:
                yield Figure(f"S7.highest_cgroup_probe_{loader}", counted / _MIB, "MiB", target)


async def cpu(effort: Effort) -> AsyncGenerator[Figure | Absent, None]:
    """Read the CPU time of an agent that tracks a thousand processes, each with two files of the driver open.

    They were started after the agent, so that it knows each.
    """
    name = f"S8.cpu_{_PROCESSES}_processes"
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        try:
            tools = Tools(Path(folder))
            loader = tools.quickest
        except MeasurementError as error:
            yield Absent(name, str(error))
            return
        async with _node_with_driver() as node:
            with node.agent(_flags(loader)) as agent:
                await _attached(node, agent)
                dev = node.simulated.directory.dev
                with tools.holders(_PROCESSES, 1, dev / "nvidiactl", dev / "nvidia0"):
                    await _tracked(node, _PROCESSES)
                    share = await share_of_core(agent, effort.of(quick=5, usual=40, full=120))
                await agent.end()
    yield Figure(name, share, "%", _CPU_PERCENT)


async def _memory_with(loader: Loader) -> tuple[int, int, int | None]:
    """Return the agent's memory with the probe attached, and the most that it took, by both methods."""
    flags = _flags(loader)
    async with _node_with_driver() as node:
        with memory_cgroup() as own:
            launcher = () if own is None else (*_JOINING, str(own.processes))
            with node.agent(flags, launcher=launcher) as agent, _highest(agent.pid) as highest:
                await _attached(node, agent)
                await scrape(flags["http-listen"], 20)
                await asyncio.sleep(SETTLE_S)
                rss = agent.rss_bytes()
                await agent.end()
            counted = own.highest_bytes() if own else None
    return rss, max(highest), counted


def _flags(loader: Loader) -> dict[str, str]:
    return {
        "http-listen": f"127.0.0.1:{free_port()}",
        "uevents": "true",
        "probe-loader": loader,
        "probe-tier": "syscalls",
    }


@contextlib.asynccontextmanager
async def _node_with_driver() -> AsyncIterator[BenchNode]:
    try:
        async with bench_node(driver="required") as node:
            yield node
    except AgentError as error:
        raise MeasurementError(str(error)) from error


async def _attached(node: BenchNode, agent: MeasuredAgent) -> None:
    """Wait until the probe is in the kernel."""
    await agent.ready()
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            probe: dict[str, Any] = {}
            with contextlib.suppress(AgentUnreachableError):  # it answers a moment after it registered
                probe = (await _asked(node, "/debug/state")).get("probe") or {}
            match probe.get("state"):
                case "running":
                    return
                case "disabled":
                    raise MeasurementError(f"the agent's probe is off: {probe.get('message')}")
            await asyncio.sleep(_POLL_S)


async def _tracked(node: BenchNode, processes: int) -> None:
    """Wait until the agent knows so many processes."""
    async with asyncio.timeout(_PATIENCE_S):
        while len((await _asked(node, "/v1/contexts")).get("processes", ())) < processes:
            await asyncio.sleep(1)


async def _asked(node: BenchNode, target: str) -> dict[str, Any]:
    client = AgentClient(str(node.simulated.directory.path / "agent/control.sock"))
    # The node that the agent is on is served by this loop.
    return dict(await in_daemon_thread("bench-ask", partial(client.get, target)))


@contextlib.contextmanager
def _highest(pid: int) -> Iterator[list[int]]:
    """Note what a process and its children take together, in bytes, while the context lasts."""
    seen: list[int] = [0]
    loop = asyncio.get_running_loop()
    others: set[int] = set()

    async def watch() -> None:
        while True:
            seen.append(_sum_of_family(pid, others))
            seen[:] = [max(seen)]
            await asyncio.sleep(_SAMPLE_S)

    watching = loop.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()


def _sum_of_family(pid: int, others: set[int]) -> int:
    """Return the memory of a process and its children; ``others`` are known to be none of them."""
    own: list[int] = []
    of_files: list[int] = [0]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in others:
            continue
        child = int(entry.name)
        try:
            if child == pid or _parent_of(child) == pid:
                sizes = _sizes(child)
                of_files.append(sizes["RssFile"])
                own.append(sizes["RssAnon"] + sizes["RssShmem"])
            else:
                others.add(child)
        except (OSError, KeyError):  # it has ended
            continue
    return sum(own) + max(of_files)


def _sizes(pid: int) -> dict[str, int]:
    """Return what proc(5) shows of a process's memory, in bytes; of one that has ended, nothing."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _parent_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(text.rpartition(")")[2].split()[1])
