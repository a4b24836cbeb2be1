"""The node of a scenario that was not started is the node that an agent finds."""

import pytest

from agent.config.load import load
from agent.model.policy import Policy
from agent.runtime.dry_run import dry_run
from agent.simulation.presets import load_preset, preset_names
from agent.simulation.scenario_node import healthy_snapshot
from tests.harness import agent_process, simulated_node, wait_allocatable

MIXED = {
    "preset": "8x-a100",
    "gpus": [
        {},
        {"mig": {"enabled": True, "devices": [{"profile": "3g.40gb"}, {"profile": "1g.10gb"}]}},
        {"mig": {"enabled": True, "devices": [{"profile": "1g.10gb"}, {"profile": "1g.10gb"}]}},
    ],
}
SLICES = "nvidia.com/mig-1g.10gb"
FLAGS = {
    "mig-strategy": "mixed",
    "device-list-strategy": "envvar,volume-mounts",
    "device-id-strategy": "index",
    "pass-device-specs": "true",
}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_healthy_snapshot(name: str) -> None:
    snapshot = healthy_snapshot(load_preset(name), Policy())
    assert [view.health.value for view in snapshot.gpus] == ["healthy"] * len(load_preset(name).gpus)
    assert snapshot.resources[0].allocatable == len(snapshot.gpus)


async def test_a_pod_gets_what_the_dry_run_shows() -> None:
    async with simulated_node(MIXED) as node, agent_process(node, **FLAGS):
        await wait_allocatable(node.kubelet, 3, resource=SLICES)
        pod = await node.kubelet.run_pod("job", "ns1", {"main": {SLICES: 3}})
        flags = node.directory.agent_flags()
    got = pod.containers["main"]
    policy = load(FLAGS | {"dev-root": flags["dev-root"]}, {}).policy
    snapshot = healthy_snapshot(load_preset(MIXED), policy)
    [answer] = dry_run(snapshot, got.devices[SLICES])["containerResponses"]
    assert answer["envs"] == dict(got.envs)
    assert [each["containerPath"] for each in answer["mounts"]] == [
        each.container_path for each in got.mounts
    ]
    assert [(each["containerPath"], each["hostPath"]) for each in answer["devices"]] == [
        (each.container_path, each.host_path) for each in got.device_specs
    ]
    assert len(got.device_specs) == 4 + 2 + 3 * 2
