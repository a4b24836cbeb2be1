"""Which pod a process runs in, read off the path of its cgroup.

Sources of its forms: kubernetes:pkg/kubelet/cm/cgroup_manager_linux.go, the cgroup managers of
containerd:internal/cri/server and cri-o:internal/config/cgmgr, cgroup_namespaces(7).
"""

import re
from typing import Final, cast

from agent.model.usage import PodRef, PodUid, Qos

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
