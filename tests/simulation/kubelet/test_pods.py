"""Pods on the emulated kubelet: admission, pod resources, checkpoint."""

import asyncio
import base64
import json
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.contract.kubelet_under_test import PodResources
from tests.contract.reference_plugin import ReferencePlugin
from tests.simulation.kubelet.plugins import GPU, four, plugin_for


async def test_a_failed_pre_start_leaves_the_pod_pending(kubelet: EmulatedKubelet) -> None:
    async with plugin_for(kubelet, pre_start=True) as plugin:
        plugin.pre_start_error = (grpc.StatusCode.INTERNAL, "device a is busy")
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        pod = await kubelet.run_pod("job", "default", {"main": {GPU: 1}})
    assert (pod.phase, pod.reason) == ("Pending", "CreateContainerConfigError")
    assert pod.message == (
        "device plugin PreStartContainer rpc failed with err: "
        "rpc error: code = Internal desc = device a is busy"
    )


@pytest.mark.parametrize(("version", "lists_finished"), [((1, 33), True), ((1, 34), False)])
async def test_a_finished_pod_is_listed_by_older_kubelets_alone_until_it_is_deleted(
    tmp_path: Path, version: tuple[int, int], *, lists_finished: bool
) -> None:
    async with (
        EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", version=version) as kubelet,
        plugin_for(kubelet) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        sockets = PodResources(kubelet.pod_resources)
        await kubelet.run_pod("old", "default", {"main": {GPU: 4}})
        kubelet.finish_pod("old", "default")
        assert (await kubelet.run_pod("new", "default", {"main": {GPU: 4}})).running
        assert set(await sockets.listed()) == {"default/new"} | ({"default/old"} if lists_finished else set())
        assert {each.pod for each in kubelet.devices(GPU).values()} == {"default/new"}
        kubelet.delete_pod("old", "default")
        assert set(await sockets.listed()) == {"default/new"}


async def test_more_calls_than_the_rate_limit_are_rejected_until_it_is_over(kubelet: EmulatedKubelet) -> None:
    sockets = PodResources(kubelet.pod_resources)
    answers = await asyncio.gather(*(sockets.listed() for _ in range(60)), return_exceptions=True)
    rejected = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
    assert {(each.code(), each.details()) for each in rejected} == {
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    }
    while True:
        try:
            assert await sockets.listed() == {}
        except grpc.aio.AioRpcError:
            continue
        break


@pytest.mark.parametrize(
    ("affinity", "amount", "asked"),
    [
        (None, 2, [({"a", "b", "c", "d"}, set(), 2)]),
        ({0}, 1, [({"a", "b"}, set(), 1)]),
        ({0}, 2, []),
        ({0}, 3, [({"a", "b", "c", "d"}, {"a", "b"}, 3)]),
        ({0, 1}, 3, [({"a", "b", "c", "d"}, set(), 3)]),
        ({7}, 1, [({"a", "b", "c", "d"}, set(), 1)]),
    ],
)
async def test_a_preference_is_asked_for_among_the_devices_on_the_nodes_of_the_pod(
    tmp_path: Path, affinity: set[int] | None, amount: int, asked: list[tuple[set[str], set[str], int]]
) -> None:
    nodes = None if affinity is None else frozenset(affinity)
    async with (
        EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", numa_affinity=nodes) as kubelet,
        plugin_for(kubelet, preferred=True) as plugin,
    ):
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        pod = await kubelet.run_pod("job", "default", {"main": {GPU: amount}})
    requests = [
        request.container_requests[0] for name, request in plugin.calls if name == "GetPreferredAllocation"
    ]
    assert [
        (set(each.available_deviceIDs), set(each.must_include_deviceIDs), each.allocation_size)
        for each in requests
    ] == asked
    given = set(pod.containers["main"].devices[GPU])
    assert len(given) == amount
    if affinity == {0}:
        assert given <= {"a", "b"} or given >= {"a", "b"}


async def test_a_running_pod_shows_what_became_of_its_devices(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.run_pod("job", "default", {"main": {GPU: 4}})
    await plugin.send(four("a")[:3])
    await kubelet.wait_for(lambda seen: seen.capacity(GPU) == 3)
    shown = {"a": "Unhealthy", "b": "Healthy", "c": "Healthy", "d": "Unknown"}
    assert kubelet.pod("job", "default").containers["main"].health == {GPU: shown}


async def test_pod_resources_list_each_device_by_itself_with_its_numa_node(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    await kubelet.run_pod("job", "default", {"main": {GPU: 4}})
    pod = await PodResources(kubelet.pod_resources).get("job", "default")
    found = [
        (list(each.device_ids), [node.ID for node in each.topology.nodes])
        for each in pod.containers[0].devices
    ]
    assert found == [(["a"], [0]), (["b"], [0]), (["c"], [1]), (["d"], [1])]


async def test_the_checkpoint_has_the_kubelets_shape(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin
) -> None:
    path = kubelet.device_plugins / "kubelet_internal_checkpoint"
    assert json.loads(path.read_bytes())["Data"] == {
        "PodDeviceEntries": None,
        "RegisteredDevices": {GPU: ["a", "b", "c", "d"]},
    }
    await plugin.send(four("d"))
    await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 3)
    await kubelet.run_pod("job", "default", {"main": {GPU: 3}})
    document = json.loads(path.read_bytes())
    (entry,) = document["Data"]["PodDeviceEntries"]
    assert entry["DeviceIDs"] == {"0": ["a", "b"], "1": ["c"]}
    assert (entry["ContainerName"], entry["ResourceName"]) == ("main", GPU)
    answer = pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
    assert answer.envs["REFERENCE_DEVICES"] == "a,b,c"
    assert isinstance(document["Checksum"], int)
    kubelet.finish_pod("job", "default")
    assert json.loads(path.read_bytes())["Data"]["PodDeviceEntries"] is None


@pytest.mark.slow
async def test_the_contract_suite_can_be_pointed_at_a_running_kubelet(kubelet: EmulatedKubelet) -> None:
    """It names what it would need for the tests that it skips."""
    command = ["-m", "pytest", "tests/contract", "--kubelet-dir", str(kubelet.device_plugins)]
    directories = ["--pod-resources-dir", str(kubelet.pod_resources), "-p", "no:cacheprovider", "-rs"]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *directories,
        "-k",
        "advertises or starts_deletes or active_pod",
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    assert child.returncode == 0, output.decode()
    assert b"a real kubelet is restarted by --kubelet-restart CMD alone" in output
    assert b"a pod on a real kubelet needs --kubelet-manifests DIR" in output
    assert {each.peer_pid for each in kubelet.registrations} == {child.pid}


async def test_pods_follow_a_folder_of_manifests(tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    manifests.mkdir()
    (manifests / "broken.yaml").write_text("kind: Pod\nmetadata: [")
    (manifests / ".hidden.yaml").write_text(MANIFEST)
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", manifests=manifests) as kubelet:
        (manifests / "job.yaml").write_text(MANIFEST)
        await kubelet.wait_for(lambda seen: len(seen.pods) == 1)
        pod = kubelet.pod("job-emulated", "team")
        assert (pod.running, list(pod.containers)) == (True, ["main"])
        (manifests / "job.yaml").rename(manifests / ".job.yaml")
        await kubelet.wait_for(lambda seen: not seen.pods)


MANIFEST = """
kind: Pod
metadata: {name: job, namespace: team}
spec: {containers: [{name: main, resources: {limits: {cpu: 500m, example.com/unknown: 1}}}]}
"""
