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
        await node.do("mps-daemon", {"command": "start"})
        await wait_allocatable(node.kubelet, 8, capacity=8)

        await node.do("mps-daemon", {"command": "stop"})
        await wait_allocatable(node.kubelet, 0, capacity=8)
        config.write_text(TIME_SLICING)
        await wait_allocatable(node.kubelet, 8, capacity=8)


async def test_after_a_reload_with_another_mps_root_the_daemon_is_watched_there(tmp_path: Path) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
    (roots[0] / ".ready").touch()
    config = tmp_path / "config.yaml"
    texts = [f"flags: {{mpsRoot: {root}}}\n{MPS}" for root in roots]
    config.write_text(texts[0])
    async with (
        simulated_node("4x-t4") as node,
        agent_process(node, config_file=str(config), mps_root=None) as agent,
    ):
        await wait_allocatable(node.kubelet, 8, capacity=8)
        config.write_text(texts[1])
        await wait_allocatable(node.kubelet, 0, capacity=8)
        (roots[1] / ".ready").touch()
        await wait_allocatable(node.kubelet, 8, capacity=8)
        (roots[0] / ".ready").unlink()
        config.write_text(texts[0])
        await wait_allocatable(node.kubelet, 0, capacity=8)
        assert await agent.stop() == 0
