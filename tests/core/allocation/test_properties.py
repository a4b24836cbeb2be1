"""Any policy of giving devices, any devices, any request: against an answer that is put together naively.

Source of what it has to be: NVIDIA/k8s-device-plugin:internal/plugin/server.go, mps.go; internal/cdi/cdi.go.
"""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from agent.core.allocation.cdi import DeviceNode, DriverFiles, Hooks, qualified_names, specifications
from agent.core.allocation.cdi_schema import problems_of
from agent.core.allocation.injection import ContainerAnswer, cdi_names
from agent.core.allocation.requests import Rejection, allocate
from agent.model.facts import GpusEnumerated, MpsSeen, PolicyChanged
from agent.model.gpu import Gpu
from agent.model.policy import DeviceListStrategy, Injection, MigStrategy, Policy
from agent.model.sharing import Sharing
from agent.model.snapshot import Device
from agent.model.structs import replace
from tests.core.build import GPU, Node, gpu, mig_gpu, passed, ready

ORDER: tuple[DeviceListStrategy, ...] = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm")
EXTRA = ("gdrcopy", "gds", "mofed")
KIND = "k8s.device-plugin.nvidia.com"

INJECTIONS = st.builds(
    Injection,
    strategies=st.sets(st.sampled_from(ORDER), min_size=1).map(
        lambda chosen: tuple(strategy for strategy in ORDER if strategy in chosen)
    ),
    ids=st.sampled_from(["uuid", "index"]),
    pass_device_specs=st.booleans(),
    device_root=st.sampled_from(["/", "/run/nvidia/driver"]),
    cdi_annotation_prefix=st.sampled_from(["cdi.k8s.io/", "x/"]),
    gdrcopy=st.booleans(),
    gds=st.booleans(),
    mofed=st.booleans(),
    imex_channels=st.sampled_from([(), (0,)]),
    imex_required=st.booleans(),
    mps_root=st.just("/run/nvidia/mps"),
)
STRATEGIES: st.SearchStrategy[MigStrategy] = st.sampled_from(["none", "mixed"])
SHARINGS = st.sampled_from([Sharing(), Sharing.of({GPU: 3}), replace(Sharing.of({GPU: 2}), strategy="mps")])


def sliced() -> Gpu:
    found = mig_gpu(2, (1, 0, "1g.10gb"), (2, 0, "1g.10gb"), (5, 0, "2g.20gb"))
    minors = {mig.uuid: (10 * mig.gi, 10 * mig.gi + 1) for mig in found.mig_devices}
    devices = tuple(
        replace(mig, index=number, gi_minor=minors[mig.uuid][0], ci_minor=minors[mig.uuid][1])
        for number, mig in enumerate(found.mig_devices)
    )
    return replace(found, mig_devices=devices)


GPUS = (gpu(0), gpu(1), sliced())


def node_of(policy: Policy, control_nodes: tuple[str, ...]) -> Node:
    node = Node(policy)
    node.apply(
        ready(),
        GpusEnumerated(GPUS, control_nodes=control_nodes),
        MpsSeen(ready=True),
        *(passed(each.uuid) for each in GPUS),
    )
    return node


def naive(policy: Policy, wanted: set[Device], *, has_channel: bool, absent: set[str]) -> dict[str, Any]:
    """The answer of NVIDIA's plugin for these devices, one part after the other."""
    injection = policy.injection
    in_order = sorted(wanted, key=lambda device: (device.index, device.placement.gi, device.placement.ci))
    names = []
    for device in in_order:
        index = str(device.index) if device.mig_index is None else f"{device.index}:{device.mig_index}"
        names.append(device.uuid if injection.ids == "uuid" else index)
    names = list(dict.fromkeys(names))
    channels = ["0"] if injection.imex_channels and has_channel else []
    extras = [f"{KIND}/{kind}=all" for kind in EXTRA if getattr(injection, kind)]
    every = [f"{KIND}/gpu={name}" for name in names] + [f"{KIND}/imex-channel={each}" for each in channels]
    every += [name for name in extras if name not in absent]
    answer: dict[str, Any] = {"envs": {}, "mounts": [], "nodes": [], "annotations": {}, "cdi": []}
    if "cdi-annotations" in injection.strategies and every:
        key = f"{injection.cdi_annotation_prefix}nvidia-device-plugin_ID"
        answer["annotations"][key] = ",".join(every)
    if "cdi-cri" in injection.strategies:
        answer["cdi"] = every
    if policy.sharing.strategy == "mps" and any(device.replica is not None for device in wanted):
        answer["envs"]["CUDA_MPS_PIPE_DIRECTORY"] = f"/mps/{GPU}/pipe"
        answer["mounts"] += [
            (f"/mps/{GPU}/pipe", f"/run/nvidia/mps/{GPU}/pipe"),
            ("/dev/shm", "/run/nvidia/mps/shm"),
        ]
    if set(injection.strategies) <= {"cdi-annotations", "cdi-cri"}:
        return answer
    for kind in EXTRA:
        if getattr(injection, kind):
            answer["envs"][f"NVIDIA_{kind.upper()}"] = "enabled"
    if "envvar" in injection.strategies:
        answer["envs"]["NVIDIA_VISIBLE_DEVICES"] = ",".join(names)
        if channels:
            answer["envs"]["NVIDIA_IMEX_CHANNELS"] = "0"
    if "volume-mounts" in injection.strategies:
        where = "/var/run/nvidia-container-devices"
        answer["envs"]["NVIDIA_VISIBLE_DEVICES"] = where
        answer["mounts"] += [(f"{where}/{name}", "/dev/null") for name in names]
        answer["mounts"] += [(f"{where}/imex/{channel}", "/dev/null") for channel in channels]
    if injection.pass_device_specs:
        paths = [*CONTROL, *naive_paths(in_order), *([CHANNEL] if channels else [])]
        root = injection.device_root.rstrip("/")
        answer["nodes"] = [(path, root + path, "rw") for path in dict.fromkeys(paths)]
    return answer


def naive_paths(devices: list[Device]) -> list[str]:
    paths = []
    for device in devices:
        found = next(each for each in GPUS if each.uuid == device.placement.gpu)
        paths.append(f"/dev/nvidia{found.minor}")
        for mig in found.mig_devices:
            if mig.uuid == device.uuid:
                paths += [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (mig.gi_minor, mig.ci_minor)]
    return paths


@given(
    injection=INJECTIONS,
    strategy=STRATEGIES,
    sharing=SHARINGS,
    has_channel=st.booleans(),
    absent=st.sets(st.sampled_from([f"{KIND}/{kind}=all" for kind in EXTRA])),
    data=st.data(),
)
def test_an_answer_is_what_nvidias_plugin_gives_and_every_cdi_name_is_in_a_specification(
    injection: Injection,
    strategy: MigStrategy,
    sharing: Sharing,
    absent: set[str],
    data: st.DataObject,
    *,
    has_channel: bool,
) -> None:
    policy = Policy(mig_strategy=strategy, sharing=sharing, injection=injection)
    node = node_of(policy, (*CONTROL, CHANNEL) if has_channel else CONTROL)
    snapshot = node.snapshot()
    resource = data.draw(st.sampled_from([each for each in snapshot.resources if each.devices]))
    wanted = data.draw(st.lists(st.sampled_from(resource.devices), min_size=1, max_size=6))
    answer = allocate(
        snapshot, resource, [device.id for device in wanted], annotation_id="ID", absent=frozenset(absent)
    )
    if injection.imex_required and injection.imex_channels and not has_channel:
        assert isinstance(answer, Rejection)
        assert answer.kind == "unhealthy"
        assert CHANNEL in answer.message
        return
    assert isinstance(answer, ContainerAnswer)
    found = {
        "envs": dict(answer.envs),
        "mounts": [(mount.container_path, mount.host_path) for mount in answer.mounts],
        "nodes": [(each.container_path, each.host_path, each.permissions) for each in answer.device_nodes],
        "annotations": dict(answer.annotations),
        "cdi": list(answer.cdi_devices),
    }
    assert found == naive(policy, set(wanted), has_channel=has_channel, absent=absent)
    # What is written for the runtimes of such a node resolves all names of devices in an answer.
    paths = [f"/dev/nvidia{each.minor}" for each in GPUS] + naive_paths(
        [device for each in snapshot.resources for device in each.devices]
    )
    paths += [f"/dev/nvidia-caps/nvidia-cap{minor}" for gi in (1, 2, 5) for minor in (10 * gi, 10 * gi + 1)]
    nodes = {path: DeviceNode(path, path) for path in (*paths, *CONTROL, *([CHANNEL] * has_channel))}
    documents = specifications(
        GPUS,
        injection=injection,
        mig_strategy=strategy,
        files=DriverFiles(version="570.1", nodes=nodes),
        hooks=Hooks(None),
    )
    assert [problem for document in documents.values() for problem in problems_of(document)] == []
    resolved = {name for document in documents.values() for name in qualified_names(document)}
    assert {name for name in cdi_names(answer) if not name.endswith("=all")} <= resolved


@given(injection=INJECTIONS, before=INJECTIONS, has_channel=st.booleans())
def test_what_was_asked_for_before_leaves_no_trace(
    injection: Injection, before: Injection, *, has_channel: bool
) -> None:
    assume(injection != before)
    nodes = (*CONTROL, CHANNEL) if has_channel else CONTROL
    changed = node_of(Policy(injection=before), nodes)
    changed.apply(PolicyChanged(Policy(injection=injection)))
    fresh = node_of(Policy(injection=injection), nodes)
    assert changed.health() == fresh.health()
