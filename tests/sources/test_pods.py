"""The pods source against the emulated kubelet, and against peers that answer as no kubelet does."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from agent.errors import KubeletError
from agent.model.facts import AllocationsListed, PodsSeen
from agent.model.usage import PodSeen, PodUid
from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.stubs.podresources.v1 import api_pb2 as pods_pb
from agent.sources.pods.finished import FinishedPods
from agent.sources.pods.holders import DeviceHolders
from agent.sources.pods.source import PodsSource
from agent.sources.pods.uids import SeenPods, pods_by_uid
from agent.sources.pods.wire import MAX_ANSWER_BYTES, AbsentError, list_pods, listing_of
from tests.contract.reference_plugin import ReferencePlugin
from tests.full_socket import full
from tests.harness import short_directory
from tests.simulation.kubelet.plugins import GPU, plugin_for
from tests.sources.recorder import PATIENCE_S, Recorder, until

SOON_NS = 10_000_000
NEVER_NS = 3_600_000_000_000
LOGS = Path("/nonexistent/pod-logs")


@pytest.fixture
async def kubelet() -> AsyncIterator[EmulatedKubelet]:
    with short_directory() as directory:
        async with EmulatedKubelet(
            directory / "dp", directory / "pr", pod_logs=directory / "logs"
        ) as emulated:
            yield emulated


@pytest.fixture
async def plugin(kubelet: EmulatedKubelet) -> AsyncIterator[ReferencePlugin]:
    """Four healthy devices, a to d."""
    async with plugin_for(kubelet) as plugin:
        await plugin.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        yield plugin


Start = Callable[..., Awaitable[PodsSource]]


@pytest.fixture
async def start(recorder: Recorder) -> AsyncIterator[Start]:
    tasks: list[asyncio.Task[None]] = []

    async def start(
        socket: Path, *, pod_logs: Path | None = None, checkpoint: Path | None = None, **settings: Any
    ) -> PodsSource:
        settings = {"period_ns": SOON_NS, "retry_ns": SOON_NS // 2, **settings}
        source = PodsSource(
            inbox=recorder.inbox,
            socket=socket,
            pod_logs=LOGS if pod_logs is None else pod_logs,
            checkpoint=LOGS if checkpoint is None else checkpoint,
            clock=time.monotonic_ns,
            **settings,
        )
        tasks.append(asyncio.get_running_loop().create_task(source.run(), name="pods"))
        return source

    yield start
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def socket_of(kubelet: EmulatedKubelet) -> Path:
    return kubelet.pod_resources / "kubelet.sock"


async def emitted(recorder: Recorder, pods: dict[str, str]) -> None:
    """Wait until the newest list is this one."""
    await recorder.until(lambda: [dict(fact.pods) for fact in recorder.of(AllocationsListed)][-1:] == [pods])


async def test_the_pod_of_each_device_is_emitted(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, start: Start, recorder: Recorder
) -> None:
    await start(socket_of(kubelet))
    await emitted(recorder, {})
    await kubelet.run_pod("train", "team-a", {"main": {GPU: 3}, "side": {GPU: 1}})
    await emitted(recorder, dict.fromkeys("abcd", "team-a/train"))
    kubelet.delete_pod("train", "team-a")
    await emitted(recorder, {})


async def test_unchanged_lists_are_emitted_again_so_that_they_do_not_become_stale(
    kubelet: EmulatedKubelet, start: Start, recorder: Recorder
) -> None:
    await start(socket_of(kubelet))
    await recorder.at_least(3, AllocationsListed)


async def test_other_resources_are_not_emitted(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, start: Start, recorder: Recorder
) -> None:
    async with plugin_for(kubelet, "example.com/nic") as other:
        await other.register()
        await kubelet.wait_for(lambda seen: seen.allocatable("example.com/nic") == 4)
        await kubelet.run_pod("net", "default", {"main": {"example.com/nic": 4}})
        await kubelet.run_pod("train", "default", {"main": {GPU: 4}})
        await start(socket_of(kubelet))
        await emitted(recorder, dict.fromkeys("abcd", "default/train"))


async def test_a_finished_pod_whose_devices_were_allocated_again_is_no_holder(
    start: Start, recorder: Recorder
) -> None:
    with short_directory() as directory:
        async with (
            EmulatedKubelet(directory / "dp", directory / "pr", version=(1, 33)) as kubelet,
            plugin_for(kubelet) as plugin,
        ):
            await plugin.register()
            await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
            await kubelet.run_pod("old", "default", {"main": {GPU: 4}})
            await start(socket_of(kubelet))
            await emitted(recorder, dict.fromkeys("abcd", "default/old"))
            kubelet.finish_pod("old", "default")
            outcome = await kubelet.run_pod("new", "default", {"main": {GPU: 1}})
            (allocated,) = outcome.containers["main"].devices[GPU]
            # Its other devices are not held any more either.
            await emitted(recorder, {allocated: "default/new"})


@pytest.mark.parametrize(
    "cgroup",
    [
        "kubepods.slice/kubepods-pod{dashed}.slice",
        "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{dashed}.slice",
        "kubepods/besteffort/pod{uid}",
        "pids/kubepods/pod{uid}",
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{dashed}.slice",
    ],
)
async def test_a_finished_pod_that_is_alone_with_its_devices_holds_none_once_its_cgroup_is_gone(
    start: Start, recorder: Recorder, cgroup: str
) -> None:
    root = "/kubelet.slice" if cgroup.startswith("kubelet") else "/"
    with short_directory() as directory:
        async with (
            EmulatedKubelet(
                directory / "dp", directory / "pr", version=(1, 33), pod_logs=directory / "logs"
            ) as kubelet,
            plugin_for(kubelet) as plugin,
        ):
            await plugin.register()
            await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
            await kubelet.run_pod("job", "default", {"main": {GPU: 4}})
            uid = next((directory / "logs").iterdir()).name.rpartition("_")[2]
            path = directory / "cgroup" / cgroup.format(uid=uid, dashed=uid.replace("-", "_"))
            path.mkdir(parents=True)
            finished = FinishedPods(directory / "cgroup", kubelet_root=root)
            await start(socket_of(kubelet), pod_logs=directory / "logs", finished=finished)
            await recorder.at_least(4, AllocationsListed)
            holders = dict.fromkeys("abcd", "default/job")
            assert all(dict(fact.pods) == holders for fact in recorder.of(AllocationsListed))
            kubelet.finish_pod("job", "default")
            path.rmdir()
            await emitted(recorder, {})


async def test_a_pod_without_a_cgroup_holds_its_devices_at_its_first_list_or_where_no_cgroup_is_visible(
    tmp_path: Path,
) -> None:
    pods = {PodUid("u-1"): PodSeen("default", "job"), PodUid("u-2"): PodSeen("default", "old", alive=False)}
    listed = ("default/job", "default/old", "default/unknown")
    finished = FinishedPods(tmp_path)
    assert [finished.after(listed, pods) for _ in range(3)] == [frozenset()] * 3
    (tmp_path / "kubepods").mkdir()
    assert [finished.after(listed, pods) for _ in range(2)] == [frozenset(), {"default/job"}]
    finished.forget()
    assert finished.after(listed, pods) == frozenset()


async def test_a_kubelet_that_comes_later_is_waited_for_quietly(
    start: Start, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    with short_directory() as directory, caplog.at_level(logging.INFO):
        async with EmulatedKubelet(directory / "dp", directory / "pr", present=False) as kubelet:
            await start(socket_of(kubelet))
            await until(lambda: "Waiting for the kubelet's pod-resources socket" in caplog.text)
            await asyncio.sleep(0.05)
            await kubelet.start()
            await emitted(recorder, {})
    ours = [record.getMessage() for record in caplog.records if record.name == "agent.sources.pods.source"]
    assert ours[0].startswith("Waiting for the kubelet's pod-resources socket: ")
    assert ours[1].startswith("The kubelet lists which pods hold devices at ")


async def test_a_kubelet_that_restarts_is_found_again(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, start: Start, recorder: Recorder
) -> None:
    await start(socket_of(kubelet))
    await emitted(recorder, {})
    for kill in (False, True):
        await kubelet.restart(downtime_s=0.03, kill=kill)
        recorder.forget()
        await emitted(recorder, {})


# Answers of the kubelet


class Peer:
    """A pod-resources server with the answers of a test."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer = b""
        self.code: grpc.StatusCode | None = None
        self.hold = asyncio.Event()
        self.hold.set()

    async def list_pods(self, _request: bytes, context: Any) -> bytes:
        self.calls += 1
        await self.hold.wait()
        if self.code is not None:
            await context.abort(self.code, "no")
        return self.answer


@asynccontextmanager
async def running_peer(path: Path) -> AsyncIterator[Peer]:
    peer = Peer()
    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    methods = {"List": grpc.unary_unary_rpc_method_handler(peer.list_pods)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", methods),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        yield peer
    finally:
        peer.hold.set()
        await server.stop(0)


@pytest.fixture
def path() -> Any:
    with short_directory() as directory:
        yield directory / "kubelet.sock"


async def failure_of(path: Path, timeout_s: float = PATIENCE_S) -> str:
    with pytest.raises(KubeletError) as raised:
        await list_pods(path, timeout_s=timeout_s)
    return str(raised.value)


async def test_an_answer_over_the_bound_is_not_taken(path: Path) -> None:
    async with running_peer(path) as peer:
        peer.answer = bytes(MAX_ANSWER_BYTES)
        assert "sent over 16 MiB" in await failure_of(path)


async def test_a_long_answer_within_the_bound_is_taken(path: Path) -> None:
    async with running_peer(path) as peer:
        peer.answer = bytes(MAX_ANSWER_BYTES - 100_000)
        assert len(await list_pods(path, timeout_s=PATIENCE_S)) == len(peer.answer)


async def test_a_kubelet_that_does_not_answer_is_given_up_on(path: Path) -> None:
    async with running_peer(path) as peer:
        peer.hold.clear()
        assert "did not answer List" in await failure_of(path, timeout_s=0.05)


async def test_an_old_kubelet_is_named(path: Path) -> None:
    async with running_peer(path) as peer:
        peer.code = grpc.StatusCode.UNIMPLEMENTED
        assert "does not serve List of pod-resources v1" in await failure_of(path)


async def test_a_rejection_has_the_kubelets_message(path: Path) -> None:
    async with running_peer(path) as peer:
        peer.code = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "rejected List: RESOURCE_EXHAUSTED: no" in await failure_of(path)


async def test_a_peer_that_speaks_something_else_is_survived(path: Path) -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(hang_up, str(path))
    assert "closed the connection" in await failure_of(path)
    server.close()


async def test_a_socket_that_is_not_there_or_abandoned_is_an_absent_kubelet(path: Path) -> None:
    with pytest.raises(AbsentError):
        await list_pods(path, timeout_s=PATIENCE_S)
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
        with pytest.raises(AbsentError):
            await list_pods(path, timeout_s=PATIENCE_S)


async def test_a_kubelet_that_takes_no_more_connections_is_named(path: Path) -> None:
    with full(path):
        assert f"accepts no connection on {path}" in await failure_of(path)


async def test_something_that_is_no_socket_is_named(path: Path) -> None:
    path.parent.joinpath("file").touch()
    with pytest.raises(KubeletError):
        await list_pods(path.parent / "file", timeout_s=PATIENCE_S)


async def test_a_failure_is_tried_once_more_in_a_period(
    path: Path, start: Start, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_peer(path) as peer:
        peer.code = grpc.StatusCode.INTERNAL
        await start(path, period_ns=NEVER_NS)
        await until(lambda: peer.calls == 2)
        await asyncio.sleep(0.05)
        assert peer.calls == 2
    assert recorder.of(AllocationsListed) == []
    records = [record for record in caplog.records if record.name == "agent.sources.pods.source"]
    (line,) = [record.getMessage() for record in records]
    assert line.startswith("Listing the pods that hold devices failed: ")


async def test_garbage_is_no_list(path: Path, start: Start, recorder: Recorder) -> None:
    async with running_peer(path) as peer:
        peer.answer = b"\xff" * 100
        await start(path)
        await until(lambda: peer.calls >= 4)
        assert recorder.of(AllocationsListed) == []
        peer.answer = b""
        await emitted(recorder, {})


def test_an_answer_is_taken_apart() -> None:
    def devices(resource: str, *ids: str) -> pods_pb.ContainerDevices:
        return pods_pb.ContainerDevices(resource_name=resource, device_ids=ids)

    def container(*listed: pods_pb.ContainerDevices) -> pods_pb.ContainerResources:
        return pods_pb.ContainerResources(name="main", devices=listed)

    answer = pods_pb.ListPodResourcesResponse(
        pod_resources=[
            pods_pb.PodResources(
                name="train",
                namespace="a",
                containers=[
                    container(devices("nvidia.com/gpu", "U0"), devices("nvidia.com/gpu", "U0")),
                    container(devices("nvidia.com/mig-1g.5gb", "M0", "M1"), devices("x.org/y", "Z")),
                ],
            ),
            pods_pb.PodResources(name="idle", namespace="a"),
        ]
    )
    claims = listing_of(answer.SerializeToString(), prefix="nvidia.com/").claims
    assert claims == {"a/train": frozenset({"U0", "M0", "M1"})}


# Holders of devices


def claims(**pods: str) -> dict[str, frozenset[str]]:
    return {pod: frozenset(devices.split()) for pod, devices in pods.items()}


def test_a_device_that_one_pod_is_listed_with_is_held_by_it() -> None:
    assert DeviceHolders().after(claims(a="D1 D2", b="D3")) == {"D1": "a", "D2": "a", "D3": "b"}


def test_of_two_pods_the_one_that_came_later_is_the_holder() -> None:
    holders = DeviceHolders()
    holders.after(claims(a="D1 D2"))
    assert holders.after(claims(a="D1 D2", b="D1")) == {"D1": "b"}
    # It stays so, for as long as the finished pod is listed as it was.
    assert holders.after(claims(a="D1 D2", b="D1")) == {"D1": "b"}
    assert holders.after(claims(a="D2", b="D1")) == {"D1": "b"}
    assert holders.after(claims(a="D2")) == {}


def test_of_two_pods_that_were_there_first_neither_is_guessed() -> None:
    holders = DeviceHolders()
    both = {"D1": "a or b", "D2": "a"}
    assert holders.after(claims(b="D1", a="D1 D2")) == both
    assert holders.after(claims(b="D1", a="D1 D2")) == both
    assert holders.after(claims(b="D1")) == {"D1": "b"}


def test_of_several_that_came_since_those_before_are_finished() -> None:
    holders = DeviceHolders()
    holders.after(claims(a="D1"))
    assert holders.after(claims(a="D1", b="D1", c="D1")) == {"D1": "b or c"}
    assert holders.after(claims(a="D1", b="D1", c="D1", d="D1")) == {"D1": "d"}


def test_a_new_pod_of_a_finished_ones_name_is_a_holder() -> None:
    holders = DeviceHolders()
    holders.after(claims(a="D1"))
    holders.after(claims(a="D1", b="D1"))
    assert holders.after(claims(a="D2", b="D1")) == {"D1": "b", "D2": "a"}


def test_a_list_after_a_gap_is_not_compared() -> None:
    holders = DeviceHolders()
    holders.after(claims(a="D1"))
    holders.forget()
    assert holders.after(claims(a="D1", b="D1")) == {"D1": "a or b"}


# UIDs


def seen(recorder: Recorder) -> dict[str, PodSeen]:
    """Return the newest pods by name and UID."""
    newest = recorder.of(PodsSeen)[-1].pods
    return {f"{pod.full_name} {uid}": pod for uid, pod in newest.items()}


@pytest.mark.parametrize("by_logs", [True, False])
async def test_the_uid_of_each_pod_is_emitted(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, start: Start, recorder: Recorder, *, by_logs: bool
) -> None:
    """By the names of log directories, or by the kubelet's checkpoint where those are not visible."""
    await kubelet.run_pod("job", "ns1", {"main": {GPU: 1}})
    await start(
        socket_of(kubelet),
        pod_logs=kubelet.pod_resources.parent / "logs" if by_logs else None,
        checkpoint=kubelet.device_plugins / "kubelet_internal_checkpoint",
    )
    await recorder.until(lambda: bool(recorder.of(PodsSeen)))
    assert seen(recorder) == {"ns1/job 00000000-0000-4000-9000-000000000001": PodSeen("ns1", "job")}
    assert recorder.of(PodsSeen)[-1].complete is by_logs


async def test_a_pod_that_was_deleted_is_gone(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, start: Start, recorder: Recorder
) -> None:
    await kubelet.run_pod("job", "ns1", {"main": {GPU: 1}})
    await start(socket_of(kubelet), pod_logs=kubelet.pod_resources.parent / "logs")
    await recorder.until(lambda: bool(recorder.of(PodsSeen)))
    kubelet.delete_pod("job", "ns1")
    await recorder.until(lambda: not recorder.of(PodsSeen)[-1].pods)


async def test_no_pods_are_emitted_where_their_uids_are_unknown(
    kubelet: EmulatedKubelet, plugin: ReferencePlugin, start: Start, recorder: Recorder
) -> None:
    await start(socket_of(kubelet))
    await recorder.until(lambda: len(recorder.of(AllocationsListed)) > 1)
    assert recorder.of(PodsSeen) == []


def uids_of(directory: Path, *listed: str) -> dict[str, bool]:
    """Return by UID whether the pod is alive, from the names in a directory of logs."""
    pods = pods_by_uid(listed, {}, pod_logs=directory, checkpoint=LOGS)
    assert pods is not None
    return {uid: pod.alive for uid, pod in pods.pods.items()}


def test_a_pod_that_the_kubelet_does_not_list_is_not_alive(tmp_path: Path) -> None:
    (tmp_path / "ns1_job-a_AAAA-1").mkdir()
    (tmp_path / "ns1_job-b_bbbb-2").mkdir()
    assert uids_of(tmp_path, "ns1/job-b") == {"aaaa-1": False, "bbbb-2": True}


def test_of_two_pods_of_one_name_only_the_newer_is_alive(tmp_path: Path) -> None:
    """A StatefulSet makes a pod of the same name as soon as the old one is gone."""
    for age, uid in enumerate(("new", "old")):
        path = tmp_path / f"ns1_db-0_{uid}"
        path.mkdir()
        os.utime(path, (1_000 - age, 1_000 - age))
    assert uids_of(tmp_path, "ns1/db-0") == {"new": True, "old": False}


def test_what_is_no_directory_of_a_pod_is_skipped(tmp_path: Path) -> None:
    for name in ("lost+found", "ns1_job", "ns1__uid", "a_b_c_d"):
        (tmp_path / name).mkdir()
    assert uids_of(tmp_path) == {}


def test_no_more_pods_are_read_than_the_bound(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"ns_p{number}_u{number}").mkdir()
    read = partial(pods_by_uid, (), {}, pod_logs=tmp_path, checkpoint=LOGS)
    seen = read(max_pods=3)
    assert seen is not None
    assert len(seen.pods) == 3
    # Pods that are not read are not gone.
    assert read(max_pods=2) is None


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"Data": 3}', '{"Data": {"PodDeviceEntries": [3]}}', "[" * 100_000]
)
def test_a_checkpoint_that_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text(text)
    assert pods_by_uid((), {}, pod_logs=LOGS, checkpoint=checkpoint) is None


def test_a_checkpoint_without_pods_is_complete_and_empty(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text('{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 1}')
    assert pods_by_uid((), {}, pod_logs=LOGS, checkpoint=checkpoint) == SeenPods({}, complete=False)
