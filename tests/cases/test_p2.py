"""P2, iovisor/bcc#1949: a long-lived tracing process grows, with each load and without a limit."""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.model.facts import KubeletSocketSeen
from agent.probe.kernel import Roots
from agent.probe.request import Request
from agent.simulation.node import SimulatedNode
from tests.core.build import K1, MS, S, gpu, healthy_node
from tests.harness import AgentProcess, agent_process, simulated_node, wait_allocatable, why_no_driver_double
from tests.other_machine import FAILS, OtherMachine, why_no_other_machine
from tests.probe.conftest import loaded, why_no_bcc, why_no_probe
from tests.probe.machines import Machine
from tests.sources.recorder import until

ONE_GPU = {"preset": "4x-t4", "gpus": 1}
POLL = "nvmlDeviceGetCount"
INIT, SHUTDOWN = "nvmlInitWithFlags", "nvmlShutdown"
FDS_UNDER_WAY = 8
"""Connections and files that happen to be open at one count and not at the other; a leak has thousands."""
GROWTH_BYTES = 5 * 2**20
CYCLES = 100


@pytest.fixture
def machine(tmp_path: Path) -> OtherMachine:
    if why := why_no_other_machine() or why_no_probe():
        pytest.skip(why)
    made = OtherMachine(tmp_path)
    made.has_bcc(FAILS)
    made.has_release("6.1.0-50-amd64")
    made.has_headers("6.1.0-50-amd64")
    return made


@pytest.fixture
def _bcc(tmp_path_factory: pytest.TempPathFactory) -> None:
    if why := why_no_probe() or why_no_bcc(tmp_path_factory.mktemp("headers")):
        pytest.skip(why)


@pytest.fixture
def _double() -> None:
    if why := why_no_driver_double():
        pytest.skip(why)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


async def wait_calls(node: SimulatedNode, count: int) -> None:
    await until(lambda: node.nvml.calls(POLL) >= count)


async def grows_in_polls(node: SimulatedNode, agent: AgentProcess) -> tuple[int, int]:
    """Return by how many descriptors and bytes the agent grows from poll 100 to poll 1,000."""
    pid = agent.process.pid
    await wait_calls(node, 100)
    before = descriptors(pid), resident_bytes(pid)
    await wait_calls(node, 1_000)
    return descriptors(pid) - before[0], resident_bytes(pid) - before[1]


@pytest.mark.slow
async def test_a_thousand_polls_compile_once_and_leave_nothing_behind(machine: OtherMachine) -> None:
    async with simulated_node(ONE_GPU) as node:
        flags = {"poll": "10ms", "probe_tier": "auto", "probe_loader": "bcc"}
        async with agent_process(node, launcher=machine.launcher(), **flags) as agent:
            await wait_allocatable(node.kubelet, 1, capacity=1)
            await agent.wait_answer("/debug/state", lambda _, body: has_probe(body, "disabled"))

            fds, grown = await grows_in_polls(node, agent)

            assert abs(fds) <= FDS_UNDER_WAY
            assert grown < GROWTH_BYTES
            assert machine.compilations == 1
            assert agent.process.pid not in machine.importers
            assert node.nvml.calls(INIT) - node.nvml.calls(SHUTDOWN) == 1
            assert await agent.stop() == 0
        assert node.nvml.calls(INIT) - node.nvml.calls(SHUTDOWN) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("_bcc", "_double")
async def test_with_the_probe_in_the_kernel_the_agent_has_no_compiler_and_does_not_grow() -> None:
    flags = {"poll": "10ms", "probe_tier": "auto", "probe_loader": "bcc"}
    async with simulated_node(ONE_GPU, driver="required") as node, agent_process(node, **flags) as agent:
        await wait_allocatable(node.kubelet, 1, capacity=1)
        await agent.wait_answer("/debug/state", lambda _, body: has_probe(body, "running"))

        fds, grown = await grows_in_polls(node, agent)

        assert abs(fds) <= FDS_UNDER_WAY
        assert grown < GROWTH_BYTES
        mapped = Path(f"/proc/{agent.process.pid}/maps").read_text()
        assert [name for name in ("libbcc", "LLVM", "libclang", "libbpf", "libelf") if name in mapped] == []
        attached = [line for line in agent.log if line["message"].startswith("The probe is attached: ")]
        assert len(attached) == 1
        assert await agent.stop() == 0


def has_probe(body: Any, state: str) -> bool:
    return bool(body["probe"]) and body["probe"]["state"] == state


async def test_with_the_probe_off_no_loader_starts(machine: OtherMachine) -> None:
    async with simulated_node(ONE_GPU) as node:
        flags = {"poll": "10ms", "probe_loader": "bcc", "probe_tier": "off"}
        async with agent_process(node, launcher=machine.launcher(), **flags) as agent:
            await wait_allocatable(node.kubelet, 1, capacity=1)
            await wait_calls(node, 200)

            assert (await agent.get("/debug/state"))[1]["probe"] is None
            assert (await agent.get("/v1/contexts"))[1]["complete"] is None
            assert machine.importers == []


@pytest.mark.usefixtures("_bcc")
def test_a_hundred_reloads_of_the_driver_load_the_probe_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine")
    machine.with_kprobes(pmu=999)
    Path(machine.roots.sys, "kernel").mkdir()
    Path(machine.roots.sys, "kernel/btf").symlink_to("/sys/kernel/btf")
    roots = replace(Roots(), sys=machine.roots.sys, node_proc=machine.roots.node_proc)
    loads = tmp_path / "loads"
    launcher = ("sh", "-c", f'echo loaded >> {loads}; exec "$@"', "sh")
    probe = loaded(Request(loader="bcc", tier="driver", roots=roots), launcher=launcher)
    module = Path(machine.roots.sys, "module/nvidia")
    pid = os.getpid()
    try:
        before: tuple[int, int] | None = None
        for cycle in range(CYCLES):
            module.mkdir(parents=True)
            probe.reattach()
            module.rename(machine.root / f"gone-{cycle}")
            probe.reattach()
            before = before or (descriptors(pid), resident_bytes(pid))

        assert before is not None
        assert abs(descriptors(pid) - before[0]) <= 2
        assert resident_bytes(pid) - before[1] < GROWTH_BYTES
        assert loads.read_text() == "loaded\n"
    finally:
        probe.close()


def test_a_kubelet_that_rejects_is_asked_ever_less_often_and_registered_with_when_it_accepts() -> None:
    node = healthy_node(gpu(0))
    node.apply(KubeletSocketSeen(K1))
    end_ns = node.now_ns + 60 * S
    while node.now_ns < end_ns:
        node.fail_registration()
        asked = len(node.registrations())
        while len(node.registrations()) == asked:
            node.after(100 * MS)
    tries = [at_ns for at_ns in node.registrations() if at_ns < end_ns]
    assert len(tries) <= 12
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert waits[-1] > 10 * waits[0]

    node.accept()

    assert node.standing().registered
    assert not node.standing().message
