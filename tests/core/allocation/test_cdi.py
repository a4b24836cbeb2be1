"""The CDI specification of the devices of a node, against documents written by hand."""

from collections.abc import Iterable
from typing import Any

import pytest

from agent.config.values import CDI_HOOKS
from agent.core.allocation.cdi import (
    SOCKET,
    DeviceNode,
    DriverFiles,
    Drm,
    Hooks,
    Link,
    Mount,
    left_out,
    qualified_names,
    specifications,
)
from agent.core.allocation.cdi_schema import problems_of
from agent.core.allocation.injection import cdi_name, name_in_container
from agent.core.allocation.nodes import CAPABILITY_NODE
from agent.core.health.inventory import AdvertisedDevice
from agent.model.facts import DeviceNodesSeen, PolicyChanged
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import Health, Reason
from agent.model.ids import DeviceId, GpuUuid, Placement, ResourceName
from agent.model.policy import Injection, MigStrategy, Policy
from agent.model.snapshot import Device
from agent.model.structs import replace
from tests.core.build import U0, U1, gpu, healthy_node, mig_gpu, mig_uuid

LIB = "/usr/lib/x86_64-linux-gnu"
CTK = "/usr/bin/nvidia-ctk"
NO_HOOKS = Hooks(None)
USED_HOOKS = set(CDI_HOOKS) - {"chmod", "create-soname-symlinks"}
READ_ONLY = ["ro", "nosuid", "nodev", "rbind", "rprivate"]


def nodes(*paths: str, root: str = "") -> dict[str, DeviceNode]:
    return {path: DeviceNode(path, root + path) for path in paths}


FILES = DriverFiles(
    version="550.54",
    nodes=nodes("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", root="/run/nvidia"),
    mounts=(Mount(f"/run/nvidia{LIB}/libcuda.so.550.54", f"{LIB}/libcuda.so.550.54"),),
    links=(Link("libcuda.so.1", f"{LIB}/libcuda.so"),),
    library_dirs=(LIB, "/opt/lib"),
    linker_dirs=(LIB,),
)


def made(
    gpus: Iterable[Gpu] = (gpu(0), gpu(1)),
    *,
    files: DriverFiles = FILES,
    hooks: Hooks = NO_HOOKS,
    mig_strategy: MigStrategy = "none",
    **injection: Any,
) -> dict[str, dict[str, Any]]:
    documents = specifications(
        gpus, injection=Injection(**injection), mig_strategy=mig_strategy, files=files, hooks=hooks
    )
    for document in documents.values():
        assert problems_of(document) == ()
    return documents


OLD_UUID = f"MIG-{U1}/1/0"
SLASHED = replace(
    mig_gpu(1),
    mig_devices=(
        MigDevice(OLD_UUID, gi=1, ci=0, profile="1g.10gb", memory_bytes=0, gi_minor=31, ci_minor=41),
        MigDevice(
            mig_uuid(1), gi=2, ci=0, profile="1g.10gb", memory_bytes=0, index=1, gi_minor=32, ci_minor=42
        ),
    ),
)
"""A GPU of whose MIG devices one has a UUID as drivers before 470 gave them, which CDI takes for no name."""


def test_a_device_without_a_cdi_name_is_unhealthy_and_excludes_no_other() -> None:
    files = replace(
        FILES,
        nodes=nodes(
            "/dev/nvidia0", "/dev/nvidia1", *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (31, 32, 41, 42))
        ),
    )
    assert names(made((gpu(0), SLASHED), files=files, mig_strategy="mixed")) == [U0, mig_uuid(1)]
    problem = (
        f"its CDI name: must be a device name, not '{OLD_UUID}'; name devices by index (--device-id-strategy)"
    )
    problems = left_out((gpu(0), SLASHED), ids="uuid", mig_strategy="mixed", files=files)
    assert problems == (f"{OLD_UUID}: {problem}",)

    by_uuid, by_index = (
        Policy(mig_strategy="mixed", injection=Injection(strategies=("cdi-cri",), ids=ids))
        for ids in ("uuid", "index")
    )
    node = healthy_node(gpu(0), SLASHED, policy=by_uuid)
    node.apply(DeviceNodesSeen(()))
    assert [(each.reason, each.placement, each.message) for each in node.conditions()] == [
        (Reason.CDI_UNRESOLVABLE, Placement(U1, 1, 0), problem)
    ]
    assert node.unhealthy(ResourceName("nvidia.com/mig-1g.10gb")) == {OLD_UUID}
    assert node.unhealthy() == set()
    node.apply(PolicyChanged(by_index))
    assert [each.lasts for each in node.conditions()] == [False]
    every = names(made((gpu(0), SLASHED), files=files, mig_strategy="mixed", ids="index"))
    assert len(every) == 3


def names(documents: dict[str, dict[str, Any]], kind: str = "gpu") -> list[str]:
    return [device["name"] for device in documents[kind]["devices"]] if kind in documents else []


def paths_of(documents: dict[str, dict[str, Any]], number: int, kind: str = "gpu") -> list[str]:
    edits = documents[kind]["devices"][number]["containerEdits"]
    return [node["path"] for node in edits["deviceNodes"]]


def hook_args(documents: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [hook["args"] for hook in documents["gpu"]["containerEdits"].get("hooks", ())]


# The document


def test_a_specification_has_each_gpu_and_the_edits_of_all() -> None:
    assert made([gpu(0)]) == {
        "gpu": {
            "cdiVersion": "0.5.0",
            "kind": "k8s.device-plugin.nvidia.com/gpu",
            "devices": [
                {
                    "name": "GPU-00000000-0000-4000-8000-000000000000",
                    "containerEdits": {
                        "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/run/nvidia/dev/nvidia0"}]
                    },
                }
            ],
            "containerEdits": {
                "env": [f"NVIDIA_CTK_LIBCUDA_DIR={LIB}:/opt/lib", "NVIDIA_VISIBLE_DEVICES=void"],
                "deviceNodes": [
                    {"path": "/dev/nvidia-uvm", "hostPath": "/run/nvidia/dev/nvidia-uvm"},
                    {"path": "/dev/nvidiactl", "hostPath": "/run/nvidia/dev/nvidiactl"},
                ],
                "mounts": [
                    {
                        "hostPath": f"/run/nvidia{LIB}/libcuda.so.550.54",
                        "containerPath": f"{LIB}/libcuda.so.550.54",
                        "options": READ_ONLY,
                    }
                ],
            },
        }
    }


def test_a_socket_is_mounted_writable_and_without_programs() -> None:
    files = replace(FILES, mounts=(Mount("/run/a", "/run/a", SOCKET),))
    (mount,) = made(files=files)["gpu"]["containerEdits"]["mounts"]
    assert mount["options"] == ["nosuid", "nodev", "rbind", "rprivate", "noexec"]


def test_mounts_stand_in_the_order_of_their_place_in_containers() -> None:
    files = replace(FILES, mounts=(Mount("/a", "/usr/b"), Mount("/b", "/usr/a")))
    mounts = made(files=files)["gpu"]["containerEdits"]["mounts"]
    assert [mount["containerPath"] for mount in mounts] == ["/usr/a", "/usr/b"]


def test_a_whole_gpu_is_annotated_as_coherent_or_not_as_far_as_that_is_known() -> None:
    sliced = replace(mig_gpu(3, (7, 0, "1g.5gb")), minor=0, coherent=True)
    [slice_] = sliced.mig_devices
    sliced = replace(sliced, mig_devices=(replace(slice_, gi_minor=1, ci_minor=2),))
    gpus = [replace(gpu(0), coherent=True), replace(gpu(1), coherent=False), replace(gpu(2), minor=0), sliced]
    files = replace(FILES, nodes={**FILES.nodes, **nodes(*(f"{CAPABILITY_NODE}{n}" for n in (1, 2)))})
    found = specifications(
        gpus,
        injection=Injection(),
        mig_strategy="mixed",
        files=files,
        hooks=NO_HOOKS,
        annotate_coherent=True,
    )["gpu"]
    assert problems_of(found) == ()
    assert found["cdiVersion"] == "0.6.0"
    assert {device["name"]: device.get("annotations") for device in found["devices"]} == {
        gpu(0).uuid: {"gpu.nvidia.com/coherent": "true"},
        gpu(1).uuid: {"gpu.nvidia.com/coherent": "false"},
        gpu(2).uuid: None,
        slice_.uuid: None,
    }
    assert all("annotations" not in device for device in made(gpus)["gpu"]["devices"])


def test_the_group_of_a_closed_node_raises_the_version() -> None:
    closed = {"/dev/nvidia0": DeviceNode("/dev/nvidia0", "/dev/nvidia0", group=44)}
    documents = made([gpu(0)], files=replace(FILES, nodes={**FILES.nodes, **closed}))
    assert documents["gpu"]["cdiVersion"] == "0.7.0"
    assert documents["gpu"]["devices"][0]["containerEdits"]["additionalGids"] == [44]
    assert "additionalGids" not in documents["gpu"]["containerEdits"]


# Names


def test_devices_are_named_by_uuid_or_by_index() -> None:
    assert names(made(ids="uuid")) == [U0, U1]
    assert names(made(ids="index")) == ["0", "1"]


def test_of_two_gpus_with_one_index_the_first_has_the_name() -> None:
    lost = gpu(1, index=0)
    documents = made([gpu(0), lost], ids="index")
    assert names(documents) == ["0"]
    assert paths_of(documents, 0) == ["/dev/nvidia0"]


@pytest.mark.parametrize("ids", ["uuid", "index"])
def test_allocate_asks_for_the_names_that_are_in_the_file(ids: Any) -> None:
    documents = made([gpu(0), sliced()], files=WITH_MIG, mig_strategy="mixed", ids=ids)
    there = qualified_names(documents["gpu"])

    def device(given: AdvertisedDevice) -> Device:
        return Device(
            DeviceId(given.id),
            given.uuid,
            given.placement,
            given.index,
            None,
            None,
            Health.HEALTHY,
        )

    whole = device(AdvertisedDevice(DeviceId(U0), U0, Placement(GpuUuid(U0)), 0, None, None))
    part = replace(
        device(
            AdvertisedDevice(
                DeviceId(mig_uuid(10)), mig_uuid(10), Placement(GpuUuid(U1), 7, 0), 1, None, None
            )
        ),
        mig_index=0,
    )
    assert there == {cdi_name("gpu", name_in_container(each, ids)) for each in (whole, part)}


# What a device needs


def test_a_gpu_without_its_node_is_excluded() -> None:
    without = {path: node for path, node in FILES.nodes.items() if path != "/dev/nvidia0"}
    assert names(made(files=replace(FILES, nodes=without))) == [U1]


def test_a_gpu_with_an_unknown_minor_is_excluded() -> None:
    assert names(made([replace(gpu(0), minor=None), gpu(1)])) == [U1]


def test_without_any_device_there_is_no_specification() -> None:
    assert made(files=replace(FILES, nodes={})) == {}


def test_a_gpu_has_its_graphics_nodes_and_the_links_to_them() -> None:
    by_path = "/dev/dri/by-path/pci-0000:10:00.0-card"
    files = replace(
        FILES,
        nodes={**FILES.nodes, **nodes("/dev/dri/card0", "/dev/dri/renderD128")},
        drm={gpu(0).pci: Drm(("/dev/dri/card0", "/dev/dri/renderD128"), (Link("../card0", by_path),))},
    )
    documents = made(files=files, hooks=Hooks(CTK))
    assert paths_of(documents, 0) == ["/dev/nvidia0", "/dev/dri/card0", "/dev/dri/renderD128"]
    assert paths_of(documents, 1) == ["/dev/nvidia1"]
    (hook,) = documents["gpu"]["devices"][0]["containerEdits"]["hooks"]
    assert hook["args"] == ["nvidia-ctk", "hook", "create-symlinks", "--link", f"../card0::{by_path}"]


# MIG


WITH_MIG = replace(
    FILES,
    nodes={**FILES.nodes, **nodes("/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67")},
)


def sliced(profile: str = "1g.10gb", **changes: Any) -> Gpu:
    """GPU 1 with one MIG device, opened by the capability nodes 66 and 67."""
    whole = mig_gpu(1, (7, 0, profile))
    (mig,) = whole.mig_devices
    return replace(whole, mig_devices=(replace(mig, **{"gi_minor": 66, "ci_minor": 67, **changes}),))


MIG_PATHS = ["/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"]


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_a_mig_device_has_its_gpu_and_the_capabilities_of_its_instances(strategy: MigStrategy) -> None:
    documents = made([sliced()], files=WITH_MIG, mig_strategy=strategy)
    assert names(documents) == [mig_uuid(10)]
    assert paths_of(documents, 0) == MIG_PATHS


def test_where_mig_is_not_advertised_the_gpu_has_a_name_too() -> None:
    documents = made([sliced()], files=WITH_MIG, mig_strategy="none")
    assert names(documents) == [U1, mig_uuid(10)]


def test_a_mig_device_is_named_by_the_indexes_of_gpu_and_device() -> None:
    parts = [replace(sliced(index=5), index=3)]
    assert names(made(parts, files=WITH_MIG, mig_strategy="mixed", ids="index")) == ["3:5"]


@pytest.mark.parametrize("changes", [{"gi_minor": None}, {"ci_minor": None}, {"ci_minor": 99}])
def test_a_mig_device_that_could_not_be_opened_is_excluded(changes: dict[str, Any]) -> None:
    assert made([sliced(**changes)], files=WITH_MIG, mig_strategy="mixed") == {}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gi_minor": None}, "the driver does not report the device node of its GPU instance"),
        (
            {"gi_minor": None, "ci_minor": None},
            "the driver does not report the device node of its GPU instance and compute instance",
        ),
        ({"ci_minor": 99}, "/dev/nvidia-caps/nvidia-cap99 does not exist"),
    ],
)
def test_excluded_devices_are_named_with_why(changes: dict[str, Any], why: str) -> None:
    gpus = [gpu(0), sliced(**changes)]
    assert left_out(gpus, ids="uuid", mig_strategy="mixed", files=WITH_MIG) == (f"{mig_uuid(10)}: {why}",)
    assert left_out(gpus, ids="uuid", mig_strategy="none", files=WITH_MIG) == ()


def test_no_device_is_excluded_where_every_file_exists() -> None:
    assert left_out([gpu(0), sliced()], ids="uuid", mig_strategy="mixed", files=WITH_MIG) == ()


@pytest.mark.parametrize(("profile", "has_graphics"), [("1g.10gb", False), ("1g.24gb+gfx", True)])
def test_only_a_mig_device_with_graphics_has_graphics_nodes(profile: str, *, has_graphics: bool) -> None:
    files = replace(
        WITH_MIG,
        nodes={**WITH_MIG.nodes, **nodes("/dev/dri/card1")},
        drm={gpu(1).pci: Drm(("/dev/dri/card1",))},
    )
    documents = made([sliced(profile)], files=files, mig_strategy="mixed")
    assert ("/dev/dri/card1" in paths_of(documents, 0)) is has_graphics


# Hooks


def test_without_the_program_there_is_no_hook() -> None:
    assert hook_args(made()) == []


def test_the_hooks_prepare_the_container_for_the_driver() -> None:
    assert hook_args(made(hooks=Hooks(CTK))) == [
        ["nvidia-ctk", "hook", "create-symlinks", "--link", f"libcuda.so.1::{LIB}/libcuda.so"],
        ["nvidia-ctk", "hook", "enable-cuda-compat", "--host-driver-version=550.54"],
        ["nvidia-ctk", "hook", "update-ldcache", "--folder", LIB],
        ["nvidia-ctk", "hook", "disable-device-node-modification"],
        ["nvidia-ctk", "hook", "update-application-profile"],
    ]
    hook = made(hooks=Hooks(CTK))["gpu"]["containerEdits"]["hooks"][0]
    assert (hook["hookName"], hook["path"]) == ("createContainer", CTK)
    assert hook["env"] == ["NVIDIA_CTK_DEBUG=false"]


def test_the_other_program_is_made_of_hooks() -> None:
    args = hook_args(made(hooks=Hooks("/opt/bin/nvidia-cdi-hook")))
    assert [words[:2] for words in args] == [
        ["nvidia-cdi-hook", "create-symlinks"],
        ["nvidia-cdi-hook", "enable-cuda-compat"],
        ["nvidia-cdi-hook", "update-ldcache"],
        ["nvidia-cdi-hook", "disable-device-node-modification"],
        ["nvidia-cdi-hook", "update-application-profile"],
    ]


@pytest.mark.parametrize("name", [name for name in CDI_HOOKS if name in USED_HOOKS])
def test_each_hook_that_is_used_can_be_disabled_alone(name: str) -> None:
    every = hook_args(made(hooks=Hooks(CTK)))
    assert {words[2] for words in every} == USED_HOOKS
    assert hook_args(made(hooks=Hooks(CTK, frozenset({name})))) == [
        words for words in every if words[2] != name
    ]


def test_hooks_are_disabled_one_by_one_or_all() -> None:
    disabled = frozenset(("create-symlinks", "update-ldcache"))
    assert [words[2] for words in hook_args(made(hooks=Hooks(CTK, disabled)))] == [
        "enable-cuda-compat",
        "disable-device-node-modification",
        "update-application-profile",
    ]
    assert hook_args(made(hooks=Hooks(CTK, frozenset(("all",))))) == []


def test_a_hook_without_work_is_not_in_the_specification() -> None:
    documents = made(files=replace(FILES, links=(), linker_dirs=()), hooks=Hooks(CTK))
    assert {words[2] for words in hook_args(documents)}.isdisjoint({"create-symlinks", "update-ldcache"})


# Other classes

BESIDE = replace(
    FILES,
    nodes={
        **FILES.nodes,
        **nodes(
            *("/dev/nvidia-fs0", "/dev/nvidia-fs1", "/dev/gdrdrv", "/dev/infiniband/rdma_cm"),
            *("/dev/infiniband/uverbs0", "/dev/nvidia-caps-imex-channels/channel0"),
        ),
    },
    storage_mounts=(Mount("/run/udev", "/run/udev"),),
)


def test_configured_devices_beside_gpus_have_a_file_for_each_kind() -> None:
    documents = made(files=BESIDE, gds=True, mofed=True, gdrcopy=True, imex_channels=(0,))
    assert set(documents) == {"gpu", "gds", "mofed", "gdrcopy", "imex-channel"}
    assert documents["gds"] == {
        "cdiVersion": "0.5.0",
        "kind": "k8s.device-plugin.nvidia.com/gds",
        "devices": [
            {
                "name": "all",
                "containerEdits": {
                    "deviceNodes": [
                        {"path": "/dev/nvidia-fs0", "hostPath": "/dev/nvidia-fs0"},
                        {"path": "/dev/nvidia-fs1", "hostPath": "/dev/nvidia-fs1"},
                    ],
                    "mounts": [{"hostPath": "/run/udev", "containerPath": "/run/udev", "options": READ_ONLY}],
                },
            }
        ],
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]},
    }
    assert paths_of(documents, 0, "mofed") == ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]
    assert paths_of(documents, 0, "gdrcopy") == ["/dev/gdrdrv"]
    assert documents["imex-channel"]["devices"] == [
        {
            "name": "0",
            "containerEdits": {
                "deviceNodes": [
                    {
                        "path": "/dev/nvidia-caps-imex-channels/channel0",
                        "hostPath": "/dev/nvidia-caps-imex-channels/channel0",
                    }
                ]
            },
        }
    ]
    assert "containerEdits" not in documents["imex-channel"]


def test_existing_devices_that_are_not_configured_have_no_file() -> None:
    assert set(made(files=BESIDE)) == {"gpu"}


def test_configured_devices_that_are_absent_have_no_file() -> None:
    assert set(made(gds=True, mofed=True, gdrcopy=True, imex_channels=(0,))) == {"gpu"}


def test_the_same_node_makes_the_same_document() -> None:
    turned = replace(BESIDE, nodes=dict(reversed(list(BESIDE.nodes.items()))), mounts=BESIDE.mounts[::-1])
    wanted: dict[str, Any] = {"gds": True, "mofed": True, "gdrcopy": True, "hooks": Hooks(CTK)}
    assert repr(made(files=turned, **wanted)) == repr(made(files=BESIDE, **wanted))
