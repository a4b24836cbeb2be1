"""Where the agent may not see processes: it reports that, and concludes nothing from what is absent.

As NVIDIA's manifests start a device plugin: without rights, in a PID namespace of its own.
"""

from pathlib import Path
from typing import Any, Final

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import (
    GPU,
    agent_process,
    simulated_node,
    uuids,
    wait_allocatable,
    wait_polls,
    why_no_driver_double,
)
from tests.probe.conftest import why_no_probe

WITHOUT_RIGHTS: Final = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
WITHOUT_PTRACE: Final = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
NESTED: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--cgroup")
AT_ONCE: Final = {
    f"leak_{name}": "0s"
    for name in ("memory_held", "foreign_process", "idle", "orphaned_client", "pod_gone", "stuck_exit")
}
OPENED: Final = ("sh", "-c", 'exec 9<"$0"; exec "$@"')
"""Opens the driver's files for the agent, as they are in a container's /dev, and starts it."""
PROBE_OFF: Final = {"probe_tier": "procfs"}


def shown_devices(node: SimulatedNode, root: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return launcher and flags of an agent that reaches device files without their server's /proc."""
    (root / "dev").mkdir()
    for each in node.directory.dev.iterdir():
        is_driver = each.is_symlink() and "/fd/" in str(each.readlink())
        (root / "dev" / each.name).symlink_to(Path("/proc/self/fd/9", each.name) if is_driver else each)
    served = (node.directory.dev / "nvidiactl").readlink().parent
    return (*OPENED, str(served)), {"dev_root": str(root), "probe_doubles": f"{root}/dev"}


@pytest.mark.skipif(why_no_driver_double() is not None, reason=f"{why_no_driver_double()}")
@pytest.mark.parametrize(
    ("launcher", "flags", "because"),
    [
        ((*NESTED, *WITHOUT_RIGHTS), {}, "PID namespace of its own"),
        (NESTED, {}, "PID namespace of its own"),
        (WITHOUT_RIGHTS, {}, "CAP_SYS_PTRACE is missing"),
        (WITHOUT_PTRACE, PROBE_OFF, "CAP_SYS_PTRACE is missing"),
        ((), PROBE_OFF, ""),
    ],
    ids=["static manifest", "own PID namespace", "no rights", "no ptrace", "all rights"],
)
async def test_a_node_whose_processes_are_not_visible_is_ready_and_reports_it(
    tmp_path: Path, launcher: tuple[str, ...], flags: dict[str, str], because: str
) -> None:
    async with simulated_node("4x-t4", driver="required") as node:
        opened, devices = shown_devices(node, tmp_path)
        async with agent_process(node, launcher=(*opened, *launcher), **AT_ONCE, **flags, **devices) as agent:
            await wait_allocatable(node.kubelet, 4, capacity=4)
            job = await node.kubelet.run_pod("job-a", "ns1", {"main": {GPU: 1}})
            number = uuids(node).index(job.containers["main"].envs["NVIDIA_VISIBLE_DEVICES"])
            # With no grace a process is foreign until the kubelet has listed its pod.
            await agent.wait_answer("/v1/owners", lambda _, body: body["owners"][number]["given_to"])
            await node.processes.start("train", [number], contexts=2, pod="ns1/job-a", memory_mib=4096)
            # NVML lists the process and its memory.
            await agent.wait_answer("/v1/owners", lambda _, body: holders(body, number) != [])
            first = await agent.wait_answer("/v1/contexts", lambda _, body: body["complete"] is not None)
            await wait_polls(node, 3)
            document = await agent.wait_answer(
                "/v1/contexts",
                lambda _, body: (
                    body["seen_monotonic_ns"] > first["seen_monotonic_ns"]
                    and body["complete"] is (because == "")
                ),
            )

            assert because in document["incomplete_because"]
            assert (await agent.get("/v1/conditions"))[1]["conditions"] == []
            await agent.wait_answer("/preflight", lambda status, _: status == 200)
            pid = node.processes.get("train").process.pid
            owner = "unknown" if because else "pod"
            listed = await agent.wait_answer(
                "/v1/owners", lambda _, body: holders(body, number) == [(pid, owner)]
            )
            assert listed["owners"][number]["memory_unclaimed_bytes"] == 0


@pytest.mark.skipif(why_no_probe() is not None, reason=f"{why_no_probe()}")
@pytest.mark.skipif(why_no_driver_double() is not None, reason=f"{why_no_driver_double()}")
async def test_a_monitor_older_than_the_agent_that_forks_and_ends_leaves_no_contexts() -> None:
    """It has files and clients of the driver, of which the agent cannot know that they hold no context."""
    async with simulated_node("4x-t4", driver="required") as node:
        monitor = (await node.processes.start("monitor", [0, 1, 2, 3], contexts=1)).process
        # It frees its contexts and keeps its files.
        await monitor.destroy(None)
        async with agent_process(node, **AT_ONCE) as agent:
            await agent.wait_answer(
                "/v1/contexts", lambda _, body: monitor.pid in [each["pid"] for each in body["processes"]]
            )
            child = await monitor.fork("monitor-2")
            try:
                await monitor.exit()
                left = await agent.wait_answer("/v1/contexts", lambda _, body: body["orphans"] != [])
                assert {each["contexts"] for each in left["orphans"]} == {None}
                await wait_polls(node, 3)
                conditions = (await agent.get("/v1/conditions"))[1]["conditions"]
                assert [each["code"] for each in conditions] == []
            finally:
                await child.close()


def holders(body: Any, number: int) -> list[tuple[int, str]]:
    return [
        (each["pid"], each["owner"])
        for each in body["owners"][number]["holders"] or ()
        if not each["is_agent"]
    ]
