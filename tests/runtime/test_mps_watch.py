"""The agent watches the MPS control daemon exactly where its configuration shares GPUs by MPS."""

from pathlib import Path

from tests.harness import agent_process, simulated_node, wait_allocatable

TIME_SLICING = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
"""
MPS = """\
version: v1
sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
"""


async def test_a_reload_that_asks_for_mps_needs_its_daemon_and_one_that_does_not_needs_none(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(TIME_SLICING)
    async with simulated_node("4x-t4") as node, agent_process(node, config_file=str(config)) as agent:
        await wait_allocatable(node.kubelet, 8, capacity=8)

        config.write_text(MPS)
        await wait_allocatable(node.kubelet, 0, capacity=8)
        await agent.wait_answer(
            "/preflight",
            lambda status, body: (
                status == 503 and {each["code"] for each in body["reasons"]} == {"mps_not_ready"}
            ),
        )
        await node.do("mps-daemon", {"order": "start"})
        await wait_allocatable(node.kubelet, 8, capacity=8)

        await node.do("mps-daemon", {"order": "stop"})
        await wait_allocatable(node.kubelet, 0, capacity=8)
        config.write_text(TIME_SLICING)
        await wait_allocatable(node.kubelet, 8, capacity=8)
