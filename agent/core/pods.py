"""Which pod a process runs in, and which pods live: read off cgroup paths and the kubelet's directories.

Sources of the forms of a cgroup's path: kubernetes:pkg/kubelet/cm/cgroup_manager_linux.go, the cgroup
managers of containerd:internal/cri/server and cri-o:internal/config/cgmgr, cgroup_namespaces(7). Of the log
directories: kubernetes:pkg/kubelet/kuberuntime/helpers.go (BuildPodLogsDirectory).
"""

import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Final, cast

from agent.model.usage import PodRef, Pods, PodSeen, PodUid, Qos

_UID: Final = (
    r"(?P<uid>[0-9a-f]{8}(?P<dash>[-_]?)[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)"
    r"[0-9a-f]{12})"
)
"""With dashes, with the underscores that systemd's names need, or a static pod's without any."""
_SLICE: Final = re.compile(
    rf"(?:.+-)?kubepods(?:-(?P<qos>burstable|besteffort))?-pod{_UID}\.slice(?P<rest>:.*)?"
)
"""The pod's directory under the kubelet's systemd driver; ``rest`` where the runtime has the other driver."""
_DIRECTORY: Final = re.compile(rf"pod{_UID}")
"""The pod's directory under the kubelet's cgroupfs driver; its parents are told apart by name."""
_CONTAINER: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_QOS_DIRECTORIES: Final = frozenset({"burstable", "besteffort"})
_DELETED: Final = " (deleted)"
"""What the kernel puts after the path of a cgroup that was removed under its processes."""


def pod_of_cgroup(path: str) -> PodRef | None:
    """Return the pod of a cgroup's path; None: the path is of no pod.

    Of pods within pods it is the outermost, which is the one that this node's kubelet knows.
    """
    parts = path.removesuffix(_DELETED).strip("/").split("/")
    for place, part in enumerate(parts):
        below = parts[place + 1] if place + 1 < len(parts) else ""
        found = _SLICE.fullmatch(part)
        if found is not None:
            qos = cast("Qos", found["qos"] or "guaranteed")
            return PodRef(_uid(found["uid"]), _container(found["rest"] or below), qos)
        found = _DIRECTORY.fullmatch(part)
        parent = parts[place - 1] if place else ""
        if found is not None and parent in {"kubepods", "..", *_QOS_DIRECTORIES}:
            return PodRef(_uid(found["uid"]), _container(below), _qos_of(parent))
    return None


def _uid(text: str) -> PodUid:
    return PodUid(text.replace("_", "-"))


def _container(text: str) -> str | None:
    found = _CONTAINER.search(text)
    return None if found is None else found[0]


def _qos_of(parent: str) -> Qos | None:
    if parent in _QOS_DIRECTORIES:
        return cast("Qos", parent)
    return "guaranteed" if parent == "kubepods" else None


def cgroup_of(text: str) -> str:
    """Return the path to judge a process by, from its /proc/PID/cgroup; empty if there is none.

    Under cgroup v1 each controller has a path of its own, and a runtime may leave some of them alone: one
    that names a pod is the best, else that of cgroup v2.
    """
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path:
            paths.setdefault(controllers, path)
    in_pod = (path for path in paths.values() if pod_of_cgroup(path) is not None)
    return next(in_pod, paths.get("", next(iter(paths.values()), "")))


def live_pods(directories: Iterable[str], listed: AbstractSet[str]) -> Pods:
    """Return the pods that the kubelet's log directories name, and whether they live.

    The kubelet lists pods as ``namespace/name`` and says no UID; the directories below /var/log/pods are
    called ``namespace_name_uid``. They come oldest first: a directory outlives its pod for a while, and of
    two pods of one name only the later can live. Names of other forms are no pods.
    """
    newest: dict[str, PodUid] = {}
    named: dict[PodUid, PodSeen] = {}
    for directory in directories:
        parts = directory.split("_")
        if len(parts) == 3 and all(parts):
            pod = PodSeen(parts[0], parts[1])
            uid = PodUid(parts[2])
            named[uid] = pod
            newest[pod.full_name] = uid
    return {
        uid: PodSeen(pod.namespace, pod.name, alive=pod.full_name in listed and newest[pod.full_name] == uid)
        for uid, pod in named.items()
    }
