"""A GPU that NVML no longer lists has no index in any document: another GPU may have its old one."""

import json
from typing import Any, cast

import pytest

from agent.commands.devices import device_lines
from agent.commands.owners import owner_lines
from agent.core.allocation.requests import Rejection, allocate, reject_start
from agent.model.snapshot import Snapshot
from agent.views import documents, usage
from tests.core.build import U0, U1, Node, enumerated, gpu, healthy_node


@pytest.fixture
def node() -> Node:
    """Return a node whose first GPU is lost, and whose second has its index."""
    node = healthy_node(gpu(0), gpu(1))
    node.apply(enumerated(gpu(1, index=0)))
    return node


@pytest.fixture
def snapshot(node: Node) -> Snapshot:
    return node.snapshot()


def as_read(document: object) -> Any:
    return cast("Any", json.loads(json.dumps(document)))


def test_the_devices_of_a_lost_gpu_have_no_index(snapshot: Snapshot) -> None:
    devices = as_read(documents.devices(snapshot, str))["devices"]
    assert {device["gpu_uuid"]: device["gpu"] for device in devices} == {U0: None, U1: 0}
    lost = next(line for line in device_lines(devices, is_wide=True) if U0 in line)
    assert lost.split("gpu_lost")[1].split()[2] == "<unknown>"


def test_the_owners_of_a_lost_gpu_have_no_index(snapshot: Snapshot) -> None:
    document = as_read(usage.ownership(snapshot, str))
    assert {owned["uuid"]: owned["gpu"] for owned in document["owners"]} == {U0: None, U1: 0}
    lines = owner_lines(document, is_wide=True)
    assert [line.split()[0] for line in lines if U0 in line] == ["<unknown>"]


def test_the_status_of_a_lost_gpu_has_no_index(snapshot: Snapshot) -> None:
    gpus = as_read(documents.state(snapshot, str))["gpus"]
    assert {each["uuid"]: each["index"] for each in gpus} == {U0: None, U1: 0}


def test_a_rejection_names_a_lost_gpu_by_its_pci_address(snapshot: Snapshot) -> None:
    [resource] = snapshot.resources
    rejections = [allocate(snapshot, resource, [U0]), reject_start(snapshot, resource, [U0])]
    for rejection in rejections:
        assert isinstance(rejection, Rejection)
        assert rejection.message.startswith(f"{U0} (GPU at 0000:10:00.0) ")
