"""Processes on a simulated node: in pods, in agreement with NVML, made to happen by actions."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.errors import AgentError, ConfigError, UsageError
from agent.simulation.actions import parse, parse_mapping
from agent.simulation.directory import NodeDirectory
from agent.simulation.driver_double.nodes import CAPABILITIES_MAJOR
from agent.simulation.gpu_processes.places import container_id
from agent.simulation.node import SimulatedNode
from agent.simulation.plan import plan_of
from agent.simulation.presets import load_preset
from agent.simulation.roots import capability_minors
from tests.harness import short_directory, simulated_node
from tests.simulation.driver_double_rig import WITHOUT_FUSE

MIB = 1 << 20


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    with short_directory() as parent, NodeDirectory.hold(parent / "node") as directory:
        made = SimulatedNode(directory, load_preset("4x-t4"), driver="required")
        try:
            await made.__aenter__()
        except AgentError as error:
            pytest.skip(str(error))
        try:
            yield made
        finally:
            await made.__aexit__(None, None, None)


async def do(node: SimulatedNode, order: str, name: str, **given: str) -> str:
    return await node.do("process", {"command": order, "name": name, **given})


def listed(node: SimulatedNode, gpu: int) -> dict[int, int]:
    """Memory in MiB of each process that NVML lists on a GPU."""
    count = node.nvml.number(gpu, "processes")
    return {
        node.nvml.number(gpu, "process_pid", row): node.nvml.number(gpu, "process_memory", row) // MIB
        for row in range(count)
    }


def used(node: SimulatedNode, gpu: int) -> int:
    return node.nvml.number(gpu, "memory_used") // MIB


async def test_nvml_lists_a_process_with_the_memory_of_its_contexts(node: SimulatedNode) -> None:
    answer = await do(node, "start", "python", gpu="3", contexts="2", memory="100")
    process = node.processes.get("python").process
    assert answer == f"Process python ({process.pid}) runs on {node.gpu_name(3)}"
    assert (listed(node, 3), used(node, 3)) == ({process.pid: 200}, 200)
    await do(node, "free", "python", contexts="1")
    assert (listed(node, 3), used(node, 3)) == ({process.pid: 100}, 100)
    await do(node, "create", "python", gpu="1")
    assert (listed(node, 1), used(node, 1)) == ({process.pid: 100}, 100)
    await do(node, "stop", "python")
    assert (listed(node, 3), used(node, 3), used(node, 1)) == ({}, 0, 0)


async def test_memory_whose_owner_ended_is_used_and_listed_for_no_process(node: SimulatedNode) -> None:
    await do(node, "start", "python", gpu="0", contexts="2", memory="300")
    await do(node, "fork", "python", to="worker")
    await do(node, "exit", "python")
    await ended(node, "python")
    assert (listed(node, 0), used(node, 0)) == ({}, 600)
    await do(node, "kill", "worker")
    await ended(node, "worker")
    assert used(node, 0) == 0


async def ended(node: SimulatedNode, name: str) -> None:
    async with asyncio.timeout(30):
        while name in [each.name for each in node.processes.all]:
            await asyncio.sleep(0.01)
    await node.processes.agree()


async def test_a_process_of_a_pod_is_in_its_cgroup(node: SimulatedNode) -> None:
    await node.kubelet.run_pod("job-a", "ns1", {"main": {}})
    try:
        await do(node, "start", "python", gpu="0", pod="ns1/job-a", comm="train")
    except AgentError as error:
        pytest.skip(str(error))
    pid = node.processes.get("python").process.pid
    (logs,) = node.directory.pod_logs.iterdir()
    uid = logs.name.rpartition("_")[2]
    cgroup = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii")
    root = node.directory.agent_flags()["kubelet-cgroup-root"]
    assert f"{root}/kubepods/burstable/pod{uid}/{container_id(uid, 'main')}\n" in cgroup
    assert Path(f"/proc/{pid}/comm").read_text(encoding="ascii") == "train\n"
    # The kubelet may know no more of it.
    node.kubelet.delete_pod("job-a", "ns1")
    assert Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii") == cgroup


async def test_the_cgroups_go_with_the_node() -> None:
    with short_directory() as parent, NodeDirectory.hold(parent / "node") as directory:
        try:
            async with SimulatedNode(directory, load_preset("4x-t4"), driver="required") as made:
                await made.kubelet.run_pod("job-a", "ns1", {"main": {}})
                await do(made, "start", "python", gpu="0", pod="ns1/job-a")
                pid = made.processes.get("python").process.pid
                lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii").splitlines()
        except AgentError as error:
            pytest.skip(str(error))
    (own,) = {line.split("/")[1] for line in lines if "kubepods" in line}
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    for place in (line.split()[1] for line in mounts if line.split()[2].startswith("cgroup")):
        assert not Path(place, own).exists()


async def test_a_leak_creates_at_its_pace_and_frees_nothing(node: SimulatedNode) -> None:
    await do(node, "start", "python", gpu="2", contexts="0")
    pid = node.processes.get("python").process.pid
    await do(node, "leak", "python", contexts="3", every="10ms")
    async with asyncio.timeout(30):
        while (await node.driver.books()).live(pid) < 3:
            await asyncio.sleep(0.01)
    assert (await node.driver.books()).counts["contexts_freed"] == 0


async def test_files_are_given_to_another_process(node: SimulatedNode) -> None:
    await do(node, "start", "python", gpu="0")
    await do(node, "start", "receiver", gpu="0", contexts="0")
    pid = node.processes.get("python").process.pid
    assert "gave its files to process receiver" in await do(node, "give", "python", to="receiver")
    await do(node, "exit", "python")
    assert (await node.driver.books()).live(pid) == 1
    await do(node, "close-range", "receiver")
    assert (await node.driver.books()).live(pid) == 0


async def test_ends_that_without_a_command_are_reported(node: SimulatedNode) -> None:
    await do(node, "start", "python", gpu="0")
    process = node.processes.get("python").process
    await process.kill()
    await ended(node, "python")
    async with asyncio.timeout(30):
        async for line in node.feed.follow():
            if line.get("text") == f"Process python ({process.pid}) has exited":
                break


async def test_a_process_on_a_mig_device_opens_what_gives_access_to_it() -> None:
    with short_directory() as parent, NodeDirectory.hold(parent / "node") as directory:
        async with SimulatedNode(directory, load_preset("8x-a100"), driver="if-possible") as node:
            await node.do("mig", {"gpu": "1", "devices": "1g.10gb,1g.10gb"})
            try:
                await do(node, "start", "python", gpu="1", gi="7", ci="0")
            except UsageError as error:
                pytest.skip(str(error))
            pid = node.processes.get("python").process.pid
            minors = capability_minors(1, 7, 0)
            opened = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir()}
            assert {f"nvidia-cap{minor}" for minor in minors} <= opened
            seen = (node.directory.dev / "nvidia-caps" / f"nvidia-cap{minors[0]}").stat()
            assert seen.st_ino == CAPABILITIES_MAJOR << 20 | minors[0]
            assert node.nvml.number(1, "process_gi") == 7


async def test_a_node_of_the_driver_can_be_held_slowed_and_released(node: SimulatedNode) -> None:
    assert await node.do("hold-node", {"name": "nvidia3"}) == "Calls on /dev/nvidia3 do not return"
    start = asyncio.get_running_loop().create_task(do(node, "start", "python", gpu="3"))
    async with asyncio.timeout(30):
        while await node.driver.held() < 1:
            await asyncio.sleep(0.01)
    await node.do("release-node", {"name": "nvidia3"})
    await start
    assert (
        await node.do("slow-node", {"name": "nvidia3", "by": "5ms"})
        == "Calls on /dev/nvidia3 return after 0.005 s"
    )
    with pytest.raises(UsageError, match="no node nvidia9"):
        await node.do("hold-node", {"name": "nvidia9"})


async def test_names_and_pods_are_checked(node: SimulatedNode) -> None:
    await do(node, "start", "python", gpu="0", contexts="0")
    with pytest.raises(UsageError, match="A process python runs already"):
        await do(node, "start", "python", gpu="0")
    with pytest.raises(
        UsageError, match="No process other runs on the simulated node; those that run: python"
    ):
        await do(node, "stop", "other")
    with pytest.raises(UsageError, match="There is no pod ns1/none"):
        await do(node, "start", "other", gpu="0", pod="ns1/none")


async def test_a_node_does_without_a_driver_double_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.simulation.driver_double.double.COMMAND", WITHOUT_FUSE)
    with short_directory() as parent, NodeDirectory.hold(parent / "node") as directory:
        with pytest.raises(AgentError, match=r"needs root and /dev/fuse.*Could not open /nonexistent/fuse"):
            await SimulatedNode(directory, load_preset("4x-t4"), driver="required").__aenter__()
        async with SimulatedNode(directory, load_preset("4x-t4"), driver="if-possible") as node:
            with pytest.raises(UsageError, match="needs root and /dev/fuse"):
                await do(node, "start", "python", gpu="0")


async def test_a_node_without_a_driver_double_names_what_it_needs() -> None:
    async with simulated_node() as plain:
        for name, given in [
            ("process", {"command": "start", "name": "python", "gpu": "0"}),
            ("hold-node", {"name": "nvidia0"}),
        ]:
            with pytest.raises(UsageError, match="made where a step starts a process"):
                await plain.do(name, given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"command": "start", "name": "a"}, "needs gpu for start"),
        ({"command": "fork", "name": "a"}, "needs the parameter to for fork"),
        ({"command": "stop", "name": "a", "gpu": "1"}, "accepts no gpu for stop"),
        ({"command": "exit", "name": "a", "contexts": "1"}, "accepts no contexts for exit"),
        ({"command": "start", "name": "a", "gpu": "1", "every": "1s"}, "accepts no every for start"),
        ({"command": "start", "name": "a", "gpu": "1", "gi": "1"}, "needs both gi and ci"),
        ({"command": "start", "name": "a", "gpu": "1", "pod": "job"}, "must be a namespace and a name"),
        ({"command": "start", "name": "a", "gpu": "1", "comm": "x" * 16}, "must have 1 to 15 bytes"),
        ({"command": "dance", "name": "a"}, "must be start, create, "),
    ],
)
def test_commands_that_make_no_sense_are_reported(given: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse("process", given)


def test_a_scenario_writes_a_command_in_one_line() -> None:
    given = {"process": "start", "name": "python", "gpu": "3", "contexts": "4", "pod": "ns1/job-a"}
    assert parse_mapping(given).name == "process"


def test_only_a_scenario_with_processes_needs_a_driver_double(tmp_path: Path) -> None:
    scenario = tmp_path / "leak.yaml"
    text = "node: 4x-t4\nsteps:\n  - do: {{{0}}}\nuntil: {{allocatable: 4}}\n"
    scenario.write_text(text.format("process: start, name: python, gpu: 0"), encoding="utf-8")
    assert plan_of(str(scenario), "4x-t4").driver_wanted == "required"
    scenario.write_text(text.format("xid: 13, gpu: 0"), encoding="utf-8")
    assert plan_of(str(scenario), "4x-t4").driver_wanted == "none"
    assert plan_of(None, "4x-t4").driver_wanted == "if-possible"
