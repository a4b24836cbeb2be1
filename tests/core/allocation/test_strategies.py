"""Every combination of device list strategies, for every kind of device, against answers written by hand.

What stands here is what NVIDIA's plugin answers (project k8s-device-plugin:internal/plugin/server.go,
mps.go), read through protobuf's own implementation. The request is out of order and holds one card twice
where it can.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

from agent.core.allocation.injection import ContainerAnswer, cdi_names
from agent.core.allocation.requests import Rejection, allocate
from agent.model.facts import MpsSeen
from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import ResourceName
from agent.model.policy import DeviceIdStrategy, DeviceListStrategy, Injection, Policy
from agent.model.sharing import Share, Sharing, SharingStrategy
from agent.model.structs import replace
from agent.runtime.dry_run import allocate_response
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.sinks.plugin.wire import encode_allocate_response
from tests.core.build import Node, enumerated, gpu, passed, ready

GPU_NAME = ResourceName("nvidia.com/gpu")
SLICES = ResourceName("nvidia.com/mig-1g.10gb")
ANNOTATION_ID = "6f1c1a52-8d5e-4d4b-9a51-0d7f3c1b2a90"
ANNOTATION = "cdi.k8s.io/nvidia-device-plugin_6f1c1a52-8d5e-4d4b-9a51-0d7f3c1b2a90"

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
LIST, DIRECTORY = "the list", "the directory of mounts"


@dataclass(frozen=True)
class Combination:
    """Which parts of an answer a combination of strategies has."""

    visible: str | None
    mounts: bool
    annotation: bool
    cri: bool
    specs: bool
    """Device nodes, and the part of an answer that is only used beside CDI."""


COMBINATIONS: Mapping[tuple[DeviceListStrategy, ...], Combination] = {
    ("envvar",): Combination(LIST, mounts=False, annotation=False, cri=False, specs=True),
    ("volume-mounts",): Combination(DIRECTORY, mounts=True, annotation=False, cri=False, specs=True),
    ("cdi-annotations",): Combination(None, mounts=False, annotation=True, cri=False, specs=False),
    ("cdi-cri",): Combination(None, mounts=False, annotation=False, cri=True, specs=False),
    ("envvar", "volume-mounts"): Combination(DIRECTORY, mounts=True, annotation=False, cri=False, specs=True),
    ("envvar", "cdi-annotations"): Combination(LIST, mounts=False, annotation=True, cri=False, specs=True),
    ("envvar", "cdi-cri"): Combination(LIST, mounts=False, annotation=False, cri=True, specs=True),
    ("volume-mounts", "cdi-annotations"): Combination(
        DIRECTORY, mounts=True, annotation=True, cri=False, specs=True
    ),
    ("volume-mounts", "cdi-cri"): Combination(DIRECTORY, mounts=True, annotation=False, cri=True, specs=True),
    ("cdi-annotations", "cdi-cri"): Combination(None, mounts=False, annotation=True, cri=True, specs=False),
    ("envvar", "volume-mounts", "cdi-annotations"): Combination(
        DIRECTORY, mounts=True, annotation=True, cri=False, specs=True
    ),
    ("envvar", "volume-mounts", "cdi-cri"): Combination(
        DIRECTORY, mounts=True, annotation=False, cri=True, specs=True
    ),
    ("envvar", "cdi-annotations", "cdi-cri"): Combination(
        LIST, mounts=False, annotation=True, cri=True, specs=True
    ),
    ("volume-mounts", "cdi-annotations", "cdi-cri"): Combination(
        DIRECTORY, mounts=True, annotation=True, cri=True, specs=True
    ),
    ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"): Combination(
        DIRECTORY, mounts=True, annotation=True, cri=True, specs=True
    ),
}


@dataclass(frozen=True)
class AnswerParts:
    """What each part of the answer is, for a request and a way to name devices."""

    visible: str
    mounts: Sequence[Mapping[str, str]]
    cdi: Sequence[str]


class Kind(msgspec.Struct, frozen=True):
    """A kind of device, how it is asked for, and the answers."""

    resource: ResourceName
    request: tuple[str, ...]
    by_uuid: AnswerParts
    by_index: AnswerParts
    specs: Sequence[Mapping[str, str]]
    envs: Mapping[str, str]
    """Always there, whatever the strategies."""
    mounts: Sequence[Mapping[str, str]]
    sharing: SharingStrategy | None = None
    mig: bool = False


def node_spec(path: str) -> dict[str, str]:
    return {"containerPath": path, "hostPath": f"/run/nvidia/driver{path}", "permissions": "rw"}


def listed(name: str) -> dict[str, str]:
    return {"containerPath": f"/var/run/nvidia-container-devices/{name}", "hostPath": "/dev/null"}


WHOLE_BY_UUID = AnswerParts(
    visible="GPU-00000000-0000-4000-8000-000000000000,GPU-00000000-0000-4000-8000-000000000001",
    mounts=[
        listed("GPU-00000000-0000-4000-8000-000000000000"),
        listed("GPU-00000000-0000-4000-8000-000000000001"),
    ],
    cdi=[
        "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000",
        "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000001",
    ],
)
WHOLE_BY_INDEX = AnswerParts(
    visible="0,1",
    mounts=[listed("0"), listed("1")],
    cdi=["k8s.device-plugin.nvidia.com/gpu=0", "k8s.device-plugin.nvidia.com/gpu=1"],
)
WHOLE_SPECS = [
    node_spec("/dev/nvidiactl"),
    node_spec("/dev/nvidia-uvm"),
    node_spec("/dev/nvidia4"),
    node_spec("/dev/nvidia5"),
]

KINDS = {
    "whole GPU": Kind(
        resource=GPU_NAME,
        request=("GPU-00000000-0000-4000-8000-000000000001", "GPU-00000000-0000-4000-8000-000000000000"),
        by_uuid=WHOLE_BY_UUID,
        by_index=WHOLE_BY_INDEX,
        specs=WHOLE_SPECS,
        envs={},
        mounts=[],
    ),
    "MIG": Kind(
        resource=SLICES,
        request=(
            "MIG-00000000-0000-5000-8000-000000000021",
            "MIG-00000000-0000-5000-8000-000000000012",
            "MIG-00000000-0000-5000-8000-000000000011",
        ),
        by_uuid=AnswerParts(
            visible="MIG-00000000-0000-5000-8000-000000000011,MIG-00000000-0000-5000-8000-000000000012,"
            "MIG-00000000-0000-5000-8000-000000000021",
            mounts=[
                listed("MIG-00000000-0000-5000-8000-000000000011"),
                listed("MIG-00000000-0000-5000-8000-000000000012"),
                listed("MIG-00000000-0000-5000-8000-000000000021"),
            ],
            cdi=[
                "k8s.device-plugin.nvidia.com/gpu=MIG-00000000-0000-5000-8000-000000000011",
                "k8s.device-plugin.nvidia.com/gpu=MIG-00000000-0000-5000-8000-000000000012",
                "k8s.device-plugin.nvidia.com/gpu=MIG-00000000-0000-5000-8000-000000000021",
            ],
        ),
        by_index=AnswerParts(
            visible="0:1,0:0,1:0",
            mounts=[listed("0:1"), listed("0:0"), listed("1:0")],
            cdi=[
                "k8s.device-plugin.nvidia.com/gpu=0:1",
                "k8s.device-plugin.nvidia.com/gpu=0:0",
                "k8s.device-plugin.nvidia.com/gpu=1:0",
            ],
        ),
        specs=[
            node_spec("/dev/nvidiactl"),
            node_spec("/dev/nvidia-uvm"),
            node_spec("/dev/nvidia4"),
            node_spec("/dev/nvidia-caps/nvidia-cap30"),
            node_spec("/dev/nvidia-caps/nvidia-cap31"),
            node_spec("/dev/nvidia-caps/nvidia-cap39"),
            node_spec("/dev/nvidia-caps/nvidia-cap40"),
            node_spec("/dev/nvidia5"),
            node_spec("/dev/nvidia-caps/nvidia-cap165"),
            node_spec("/dev/nvidia-caps/nvidia-cap166"),
        ],
        envs={},
        mounts=[],
        mig=True,
    ),
    "replica": Kind(
        resource=GPU_NAME,
        request=(
            "GPU-00000000-0000-4000-8000-000000000001::0",
            "GPU-00000000-0000-4000-8000-000000000000::2",
            "GPU-00000000-0000-4000-8000-000000000001::1",
        ),
        by_uuid=WHOLE_BY_UUID,
        by_index=WHOLE_BY_INDEX,
        specs=WHOLE_SPECS,
        envs={},
        mounts=[],
        sharing="time-slicing",
    ),
    "MPS": Kind(
        resource=GPU_NAME,
        request=(
            "GPU-00000000-0000-4000-8000-000000000001::0",
            "GPU-00000000-0000-4000-8000-000000000000::2",
            "GPU-00000000-0000-4000-8000-000000000001::1",
        ),
        by_uuid=WHOLE_BY_UUID,
        by_index=WHOLE_BY_INDEX,
        specs=WHOLE_SPECS,
        envs={"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe"},
        mounts=[
            {
                "containerPath": "/mps/nvidia.com/gpu/pipe",
                "hostPath": "/run/nvidia/mps/nvidia.com/gpu/pipe",
            },
            {"containerPath": "/dev/shm", "hostPath": "/run/nvidia/mps/shm"},
        ],
        sharing="mps",
    ),
}


def with_slices(number: int, *slices: MigDevice) -> Gpu:
    return replace(gpu(number, minor=number + 4), mig_enabled=True, mig_devices=slices)


def mig(uuid: str, gi: int, index: int, gi_minor: int, ci_minor: int) -> MigDevice:
    return MigDevice(
        uuid=f"MIG-00000000-0000-5000-8000-0000000000{uuid}",
        gi=gi,
        ci=0,
        profile="1g.10gb",
        memory_bytes=10 * 2**30,
        index=index,
        gi_minor=gi_minor,
        ci_minor=ci_minor,
    )


def gpus_of(kind: Kind) -> tuple[Gpu, ...]:
    if not kind.mig:
        return gpu(0, minor=4), gpu(1, minor=5)
    # NVML's index of a MIG device need not follow its GPU instance.
    return (
        with_slices(0, mig("11", 1, 1, 30, 31), mig("12", 2, 0, 39, 40)),
        with_slices(1, mig("21", 1, 0, 165, 166)),
    )


def node_of(kind: Kind, injection: Injection, *, control_nodes: tuple[str, ...] = CONTROL_NODES) -> Node:
    shares = (Share(kind.resource, 3),) if kind.sharing else ()
    policy = Policy(
        mig_strategy="mixed",
        sharing=Sharing(strategy=kind.sharing or "time-slicing", shares=shares),
        injection=injection,
    )
    node = Node(policy)
    gpus = gpus_of(kind)
    node.apply(ready(), replace(enumerated(*gpus), control_nodes=control_nodes))
    if kind.sharing == "mps":
        node.apply(MpsSeen(ready=True))
    node.apply(*(passed(item.uuid) for item in gpus))
    return node


def answer_of(kind: Kind, injection: Injection, **more: Any) -> dict[str, Any]:
    """Return the answer as another implementation of protobuf reads it."""
    snapshot = node_of(kind, injection, **more).snapshot()
    [resource] = [item for item in snapshot.resources if item.name == kind.resource]
    answer = allocate(snapshot, resource, kind.request, annotation_id=ANNOTATION_ID)
    assert not isinstance(answer, Rejection), answer
    read = MessageToDict(pb.AllocateResponse.FromString(encode_allocate_response([answer])))
    assert allocate_response(answer) == read, "what people are shown is what goes over the wire"
    decoded: dict[str, Any] = read["containerResponses"][0]
    return decoded


def expected(combination: Combination, kind: Kind, parts: AnswerParts, *, specs: bool) -> dict[str, Any]:
    envs = dict(kind.envs)
    if combination.visible is LIST:
        envs["NVIDIA_VISIBLE_DEVICES"] = parts.visible
    elif combination.visible is DIRECTORY:
        envs["NVIDIA_VISIBLE_DEVICES"] = "/var/run/nvidia-container-devices"
    answer = {
        "envs": envs,
        "mounts": [*kind.mounts, *(parts.mounts if combination.mounts else [])],
        "devices": kind.specs if specs and combination.specs else [],
        "annotations": {ANNOTATION: ",".join(parts.cdi)} if combination.annotation else {},
        "cdiDevices": [{"name": name} for name in parts.cdi] if combination.cri else [],
    }
    return {name: part for name, part in answer.items() if part}


def test_every_combination_is_in_the_table() -> None:
    assert len({frozenset(strategies) for strategies in COMBINATIONS}) == 15


@pytest.mark.parametrize("specs", [False, True], ids=["", "device specs"])
@pytest.mark.parametrize("ids", ["uuid", "index"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("strategies", COMBINATIONS, ids="+".join)
def test_a_container_is_given_what_nvidias_plugin_gives(
    strategies: tuple[DeviceListStrategy, ...], kind: Kind, ids: DeviceIdStrategy, *, specs: bool
) -> None:
    injection = Injection(
        strategies=strategies,
        ids=ids,
        pass_device_specs=specs,
        device_root="/run/nvidia/driver",
        mps_root="/run/nvidia/mps",
    )
    parts = kind.by_uuid if ids == "uuid" else kind.by_index
    assert answer_of(kind, injection) == expected(COMBINATIONS[strategies], kind, parts, specs=specs)


# What a container gets beside its devices

ONE = replace(KINDS["whole GPU"], request=("GPU-00000000-0000-4000-8000-000000000000",))
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"


def test_beside_cdi_enabled_features_are_in_the_environment_too() -> None:
    assert answer_of(
        ONE, Injection(strategies=("envvar", "cdi-cri"), gdrcopy=True, gds=True, mofed=True)
    ) == {
        "envs": {
            "NVIDIA_VISIBLE_DEVICES": "GPU-00000000-0000-4000-8000-000000000000",
            "NVIDIA_GDRCOPY": "enabled",
            "NVIDIA_GDS": "enabled",
            "NVIDIA_MOFED": "enabled",
        },
        "cdiDevices": [
            {"name": "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000"},
            {"name": "k8s.device-plugin.nvidia.com/gdrcopy=all"},
            {"name": "k8s.device-plugin.nvidia.com/gds=all"},
            {"name": "k8s.device-plugin.nvidia.com/mofed=all"},
        ],
    }


def test_with_cdi_alone_enabled_features_are_in_cdi_alone() -> None:
    assert answer_of(ONE, Injection(strategies=("cdi-annotations",), gds=True)) == {
        "annotations": {
            ANNOTATION: "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000,"
            "k8s.device-plugin.nvidia.com/gds=all"
        }
    }


@pytest.mark.parametrize(
    ("name", "variable"), [("gdrcopy", "NVIDIA_GDRCOPY"), ("gds", "NVIDIA_GDS"), ("mofed", "NVIDIA_MOFED")]
)
def test_each_feature_is_enabled_alone(name: str, variable: str) -> None:
    switched: dict[str, Any] = {name: True}
    answer = answer_of(ONE, Injection(strategies=("envvar",), **switched))
    assert answer["envs"] == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-00000000-0000-4000-8000-000000000000",
        variable: "enabled",
    }


def test_a_name_without_a_device_on_the_node_is_excluded() -> None:
    snapshot = node_of(ONE, Injection(strategies=("cdi-cri",), gdrcopy=True, gds=True, mofed=True)).snapshot()
    absent = {"k8s.device-plugin.nvidia.com/gds=all", "k8s.device-plugin.nvidia.com/gdrcopy=all"}
    answer = allocate(snapshot, snapshot.resources[0], ONE.request, absent=absent)
    assert not isinstance(answer, Rejection)
    assert answer.cdi_devices == (
        "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000",
        "k8s.device-plugin.nvidia.com/mofed=all",
    )


@pytest.mark.parametrize(
    ("strategy", "answer"),
    [
        (
            "envvar",
            {
                "envs": {
                    "NVIDIA_VISIBLE_DEVICES": "GPU-00000000-0000-4000-8000-000000000000",
                    "NVIDIA_IMEX_CHANNELS": "0",
                },
                "devices": [
                    {"containerPath": path, "hostPath": path, "permissions": "rw"}
                    for path in ("/dev/nvidiactl", "/dev/nvidia4", CHANNEL)
                ],
            },
        ),
        (
            "volume-mounts",
            {
                "envs": {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
                "mounts": [listed("GPU-00000000-0000-4000-8000-000000000000"), listed("imex/0")],
                "devices": [
                    {"containerPath": path, "hostPath": path, "permissions": "rw"}
                    for path in ("/dev/nvidiactl", "/dev/nvidia4", CHANNEL)
                ],
            },
        ),
        (
            "cdi-cri",
            {
                "cdiDevices": [
                    {"name": "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000"},
                    {"name": "k8s.device-plugin.nvidia.com/imex-channel=0"},
                ]
            },
        ),
        (
            "cdi-annotations",
            {
                "annotations": {
                    ANNOTATION: "k8s.device-plugin.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000,"
                    "k8s.device-plugin.nvidia.com/imex-channel=0"
                }
            },
        ),
    ],
)
def test_an_imex_channel_is_given_as_the_devices_are(
    strategy: DeviceListStrategy, answer: dict[str, Any]
) -> None:
    injection = Injection(strategies=(strategy,), imex_channels=(0,), pass_device_specs=True)
    assert answer_of(ONE, injection, control_nodes=("/dev/nvidiactl", CHANNEL)) == answer


def test_a_channel_that_is_not_configured_or_absent_is_not_in_the_answer() -> None:
    plain = {"envs": {"NVIDIA_VISIBLE_DEVICES": "GPU-00000000-0000-4000-8000-000000000000"}}
    assert answer_of(ONE, Injection(), control_nodes=(CHANNEL,)) == plain
    assert answer_of(ONE, Injection(imex_channels=(0,)), control_nodes=()) == plain


def test_an_absent_channel_that_is_required_rejects_the_container() -> None:
    required = Injection(imex_channels=(0,), imex_required=True)
    snapshot = node_of(ONE, required).snapshot()
    answer = allocate(snapshot, snapshot.resources[0], ONE.request)
    assert isinstance(answer, Rejection)
    assert answer.kind == "unhealthy"
    assert f"imex_channel_missing: {CHANNEL} does not exist" in answer.message


def test_a_hypothetical_required_channel_is_rejected_too() -> None:
    snapshot = node_of(ONE, Injection()).snapshot()
    required = Injection(imex_channels=(0,), imex_required=True)
    asked = replace(snapshot, policy=replace(snapshot.policy, injection=required))
    assert allocate(asked, asked.resources[0], ONE.request) == Rejection(
        "missing",
        f"{CHANNEL} is required for every container and does not exist on this node; create {CHANNEL}"
        " (nvidia-modprobe -c 0) and start nvidia-imex",
    )


def test_several_channels_are_in_one_variable() -> None:
    nodes = (CHANNEL, "/dev/nvidia-caps-imex-channels/channel1")
    injection = Injection(imex_channels=(0, 1), imex_required=True)
    assert answer_of(ONE, injection, control_nodes=nodes)["envs"]["NVIDIA_IMEX_CHANNELS"] == "0,1"


def test_the_directory_of_mps_may_be_written_with_a_slash_at_its_end() -> None:
    mounts = answer_of(KINDS["MPS"], Injection(mps_root="/run/nvidia/mps/"))["mounts"]
    assert mounts == KINDS["MPS"].mounts


def test_the_names_to_be_resolved_are_those_of_field_and_annotations_each_once() -> None:
    by_annotation = ContainerAnswer(annotations={"key": "a=1,a=2"})
    assert cdi_names(by_annotation) == ("a=1", "a=2")
    assert cdi_names(replace(by_annotation, cdi_devices=("a=2", "a=3"))) == ("a=2", "a=3", "a=1")
    assert cdi_names(ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": "a=4"})) == ()


def test_the_prefix_of_the_annotation_is_the_operators() -> None:
    injection = Injection(strategies=("cdi-annotations",), cdi_annotation_prefix="nvidia.cdi.k8s.io/")
    assert list(answer_of(ONE, injection)["annotations"]) == [
        "nvidia.cdi.k8s.io/nvidia-device-plugin_6f1c1a52-8d5e-4d4b-9a51-0d7f3c1b2a90"
    ]


def test_a_request_for_nothing_needs_no_annotation() -> None:
    assert answer_of(replace(ONE, request=()), Injection(strategies=("cdi-annotations", "cdi-cri"))) == {}


@pytest.mark.parametrize(("root", "path"), [("/", "/dev/nvidia4"), ("/a/", "/a/dev/nvidia4")])
def test_the_host_path_of_a_node_is_below_the_device_root(root: str, path: str) -> None:
    injection = Injection(pass_device_specs=True, device_root=root)
    assert answer_of(ONE, injection, control_nodes=())["devices"] == [
        {"containerPath": "/dev/nvidia4", "hostPath": path, "permissions": "rw"}
    ]


def test_the_nodes_of_two_compute_instances_of_one_gpu_instance_are_given_once() -> None:
    first = mig("11", 1, 0, 30, 31)
    second = replace(mig("12", 1, 1, 30, 32), ci=1)
    node = Node(Policy(mig_strategy="mixed", injection=Injection(pass_device_specs=True)))
    card = with_slices(0, first, second)
    node.apply(ready(), enumerated(card), passed(card.uuid))
    snapshot = node.snapshot()
    answer = allocate(snapshot, snapshot.resources[-1], [second.uuid, first.uuid])
    assert not isinstance(answer, Rejection)
    assert [each.host_path for each in answer.device_nodes] == [
        "/dev/nvidia4",
        "/dev/nvidia-caps/nvidia-cap30",
        "/dev/nvidia-caps/nvidia-cap31",
        "/dev/nvidia-caps/nvidia-cap32",
    ]


def test_a_slice_with_capabilities_of_unknown_path_is_rejected() -> None:
    blank = replace(mig("11", 1, 0, 30, 31), gi_minor=None, ci_minor=None)
    node = Node(Policy(mig_strategy="mixed", injection=Injection(pass_device_specs=True)))
    node.apply(ready(), enumerated(with_slices(0, blank)), passed(with_slices(0).uuid))
    snapshot = node.snapshot()
    rejection = allocate(snapshot, snapshot.resources[-1], [blank.uuid])
    assert isinstance(rejection, Rejection)
    assert "the device node of its GPU instance and compute instance" in rejection.message
