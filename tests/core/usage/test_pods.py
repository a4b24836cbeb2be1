"""The pod of a cgroup's path, in the forms that nodes have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.usage.pods import Hierarchy, pod_of_cgroup
from agent.model.usage import NoPod, PodOf, PodRef, PodUid, Qos

UID = PodUid("0f9a1b2c-3d4e-5f60-7182-93a4b5c6d7e8")
IN_SLICE = UID.replace("-", "_")
STATIC = PodUid("5d3b9c0a8e7f41d2b6c5a4f3e2d1c0b9")
CONTAINER = "7c" * 32
NODE = "e1" * 32
"""Container of a kind node."""
AS_GUARANTEED = PodRef(UID, CONTAINER, "guaranteed")
AS_BEST_EFFORT = PodRef(UID, CONTAINER, "besteffort")
SCOPE = f"crio-{CONTAINER}.scope"

BURSTABLE = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{IN_SLICE}.slice"
MANAGER = "user.slice/user-1000.slice/user@1000.service"
"""Of a login; what is below it is the user's to make."""
IN_KIND = f"docker-{NODE}.scope"
KIND = "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice"

HOST, UNKNOWN = NoPod.HOST, NoPod.UNKNOWN
FORMS: list[tuple[str, str, PodOf]] = [
    (
        "containerd, systemd",
        f"/{BURSTABLE}/cri-containerd-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    (
        "containerd, systemd, guaranteed",
        f"/kubepods.slice/kubepods-pod{IN_SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "guaranteed"),
    ),
    ("CRI-O, systemd", f"/{BURSTABLE}/crio-{CONTAINER}.scope", PodRef(UID, CONTAINER, "burstable")),
    (
        "CRI-O with crun, which makes a group of its own",
        f"/{BURSTABLE}/crio-{CONTAINER}.scope/container",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    (
        "CRI-O's monitor of a container",
        f"/{BURSTABLE}/crio-conmon-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    ("docker, systemd", f"/{BURSTABLE}/docker-{CONTAINER}.scope", PodRef(UID, CONTAINER, "burstable")),
    (
        "systemd in the container",
        f"/{BURSTABLE}/cri-containerd-{CONTAINER}.scope/system.slice/a.service",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    (
        "containerd, cgroupfs",
        f"/kubepods/burstable/pod{UID}/{CONTAINER}",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    (
        "containerd, cgroupfs, guaranteed",
        f"/kubepods/pod{UID}/{CONTAINER}",
        PodRef(UID, CONTAINER, "guaranteed"),
    ),
    (
        "CRI-O, cgroupfs",
        f"/kubepods/besteffort/pod{UID}/crio-{CONTAINER}",
        PodRef(UID, CONTAINER, "besteffort"),
    ),
    (
        "the kubelet has systemd's driver, containerd has not",
        f"/system.slice/containerd.service/kubepods-besteffort-pod{IN_SLICE}.slice:cri-containerd:{CONTAINER}",
        PodRef(UID, CONTAINER, "besteffort"),
    ),
    (
        "static pod, systemd",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{CONTAINER}.scope",
        PodRef(STATIC, CONTAINER, "burstable"),
    ),
    (
        "static pod, cgroupfs",
        f"/kubepods/burstable/pod{STATIC}/{CONTAINER}",
        PodRef(STATIC, CONTAINER, "burstable"),
    ),
    (
        "seen from another pod's cgroup namespace, systemd",
        f"/../../kubepods-burstable-pod{IN_SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    (
        "seen from another pod's cgroup namespace, cgroupfs",
        f"/../../pod{UID}/{CONTAINER}",
        PodRef(UID, CONTAINER, None),
    ),
    (
        "seen from a namespace, another class",
        f"/../../../besteffort/pod{UID}/{CONTAINER}",
        PodRef(UID, CONTAINER, "besteffort"),
    ),
    ("the pod's own group", f"/{BURSTABLE}", PodRef(UID, None, "burstable")),
    ("the pod's own group, cgroupfs", f"/kubepods/pod{UID}", PodRef(UID, None, "guaranteed")),
    (
        "a group that was removed under its process",
        f"/{BURSTABLE}/cri-containerd-{CONTAINER}.scope (deleted)",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    (
        "a pod's own group that was removed",
        f"/{BURSTABLE} (deleted)",
        PodRef(UID, None, "burstable"),
    ),
    (
        "Kata's sandbox",
        f"/kubepods/burstable/pod{UID}/kata_{CONTAINER}",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    (
        "a cluster in a pod: the outer pod is this node's",
        f"/kubepods/burstable/pod{UID}/{CONTAINER}/docker/{NODE}/kubelet/kubepods/pod{STATIC}/{NODE}",
        PodRef(UID, CONTAINER, "burstable"),
    ),
    ("the root", "/", HOST),
    ("nothing", "", UNKNOWN),
    ("a service", "/system.slice/nvidia-persistenced.service", HOST),
    ("a login", "/user.slice/user-1000.slice/session-3.scope", HOST),
    ("docker without Kubernetes", f"/docker/{CONTAINER}", HOST),
    ("podman", f"/machine.slice/libpod-{CONTAINER}.scope", HOST),
    ("all pods", "/kubepods.slice/kubepods-burstable.slice", HOST),
    ("a service of the kubelet", "/kubepods/burstable/podagent/x", HOST),
    ("a user's own name", f"/user.slice/pod{UID}/{CONTAINER}", HOST),
    ("a name that only contains one", f"/kubepods/xpod{UID}/{CONTAINER}", HOST),
    ("a name that goes on", f"/kubepods/pod{UID}0/{CONTAINER}", HOST),
    ("dashes and underscores", f"/kubepods/pod{UID.replace('-', '_', 1)}/{CONTAINER}", HOST),
    (
        "a longer number is no container",
        f"/kubepods/pod{UID}/{CONTAINER}0",
        PodRef(UID, None, "guaranteed"),
    ),
    (
        "a service named like a slice, without the kubelet",
        f"/x.slice/pod{IN_SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        UNKNOWN,
    ),
    (
        "a user's own cgroup named like the kubelet's",
        f"/{MANAGER}/{BURSTABLE}",
        HOST,
    ),
    ("a service's own cgroup named like the kubelet's", f"/system.slice/ci.service/kubepods/pod{UID}", HOST),
    ("a container's own cgroup named like the kubelet's", f"/docker/{NODE}/kubepods/pod{UID}", HOST),
    (
        "kind, seen from the machine",
        f"/system.slice/docker-{NODE}.scope/{KIND}/kubelet-kubepods-pod{IN_SLICE}.slice",
        HOST,
    ),
    ("another root than the kubelet's", f"/lxc/kubepods/pod{UID}/{CONTAINER}", UNKNOWN),
    (
        "seen from a namespace, a user's",
        f"/../../../../{MANAGER}/{BURSTABLE}",
        HOST,
    ),
    ("seen from a namespace, a service", "/../../../../system.slice/nvidia-persistenced.service", HOST),
    ("seen from a namespace, further up", "/../..", UNKNOWN),
    ("seen from a namespace, of the same pod", f"/../cri-containerd-{CONTAINER}.scope", UNKNOWN),
    ("seen from a namespace, all pods", "/../../../kubepods-burstable.slice", UNKNOWN),
]
ROOTED: list[tuple[str, str, PodOf]] = [
    (
        "/kubelet",
        f"/{KIND}/kubelet-kubepods-besteffort-pod{IN_SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "besteffort"),
    ),
    ("/kubelet", f"/kubelet/kubepods/besteffort/pod{UID}/{CONTAINER}", AS_BEST_EFFORT),
    ("/kubelet/", f"/kubelet/kubepods/pod{UID}/{CONTAINER}", AS_GUARANTEED),
    ("/kubelet", f"/kubepods/pod{UID}/{CONTAINER}", UNKNOWN),
    (
        "/apps.slice",
        f"/apps.slice/apps-kubepods.slice/apps-kubepods-pod{IN_SLICE}.slice/crio-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "guaranteed"),
    ),
    (
        "/a.slice/a-b.slice",
        f"/a.slice/a-b.slice/a-b-kubepods.slice/a-b-kubepods-pod{IN_SLICE}.slice/crio-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "guaranteed"),
    ),
    (
        "/apps.slice",
        f"/../apps-kubepods-pod{IN_SLICE}.slice/crio-{CONTAINER}.scope",
        PodRef(UID, CONTAINER, "guaranteed"),
    ),
]


@pytest.mark.parametrize(("path", "pod"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
def test_a_cgroup_names_the_pod(path: str, pod: PodOf) -> None:
    assert pod_of_cgroup(path) == pod


@pytest.mark.parametrize(("root", "path", "pod"), ROOTED)
def test_pods_are_below_the_kubelets_own_root(root: str, path: str, pod: PodOf) -> None:
    assert pod_of_cgroup(path, Hierarchy(root)) == pod


@pytest.mark.parametrize(
    ("path", "pod"),
    [
        ("/", UNKNOWN),
        ("/below", UNKNOWN),
        ("/system.slice/kubelet.service", HOST),
        (f"/kubepods/pod{UID}", PodRef(UID, None, "guaranteed")),
    ],
)
def test_in_a_namespace_of_its_own_the_root_is_not_the_machines(path: str, pod: PodOf) -> None:
    assert pod_of_cgroup(path, Hierarchy(is_private=True)) == pod


@given(
    uid=st.uuids().map(str),
    container=st.text("0123456789abcdef", min_size=64, max_size=64),
    qos=st.sampled_from(["burstable", "besteffort", "guaranteed"]),
    below=st.sampled_from(["", "/init.scope", "/kubepods/x"]),
)
def test_both_cgroup_drivers_name_the_same_pod(uid: str, container: str, qos: Qos, below: str) -> None:
    infix = "" if qos == "guaranteed" else f"-{qos}"
    directory = "" if qos == "guaranteed" else f"/{qos}"
    in_slice = f"kubepods{infix}-pod{uid.replace('-', '_')}.slice/cri-containerd-{container}.scope"
    expected = PodRef(PodUid(uid), container, qos)
    of_class = f"/kubepods{infix}.slice" if infix else ""
    assert pod_of_cgroup(f"/kubepods.slice{of_class}/{in_slice}{below}") == expected
    assert pod_of_cgroup(f"/kubepods{directory}/pod{uid}/{container}{below}") == expected


@given(st.text())
def test_any_path_is_parsed(path: str) -> None:
    pod = pod_of_cgroup(path)
    assert isinstance(pod, NoPod) or pod.uid in path.replace("_", "-")
