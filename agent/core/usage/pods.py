"""The pod, and the system service, that a process runs in, from the path of its cgroup.

Only the kubelet makes cgroups below its own root, so that only those name a pod. Users get cgroups of their
own to fill (a login's, a service's, a container's) and may give cgroups there the name of a pod's.

Sources of the forms: kubernetes:pkg/kubelet/cm/cgroup_manager_linux.go, the cgroup managers of
containerd:internal/cri/server and cri-o:internal/config/cgmgr, cgroup_namespaces(7).
"""

import re
from functools import lru_cache
from typing import Final, NamedTuple, cast

from agent.model.usage import NoPod, PodOf, PodRef, PodUid, Qos

_UID: Final = (
    r"(?P<uid>[0-9a-f]{8}(?P<dash>[-_]?)[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)[0-9a-f]{4}(?P=dash)"
    r"[0-9a-f]{12})"
)
"""With dashes, with the underscores that systemd's names need, or a static pod's without any."""
_CONTAINER: Final = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_DELETED: Final = " (deleted)"
"""What the kernel puts after the path of a cgroup that was removed under its processes."""
_ABOVE: Final = re.compile(r"(?:/\.\.)+(?=/|$)")
"""How a path begins that lies outside of the reader's cgroup namespace."""
_OF_THE_HOST: Final = re.compile(r"/(?:system\.slice|user\.slice|machine\.slice|init\.scope)(?:/|$)")
"""Cgroups that systemd makes beside the kubelet's."""
_DELEGATED: Final = re.compile(r"\.(?:service|scope)$|(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
"""Names of cgroups whose inside is left to a service, a login or a container."""
_LIKE_A_POD: Final = re.compile(rf"(?:.*-)?pod{_UID}(?:\.slice(?::.*)?)?")
_UNIT: Final = re.compile(r"(?:/\.\.)*/system\.slice/(?:[^/]+\.slice/)*(?P<unit>[^/]+)\.service(?:/|$)")


class Hierarchy(NamedTuple):
    """Where the kubelet's cgroups are, and from where paths are read."""

    kubelet_root: str = "/"
    """The kubelet's --cgroup-root."""
    is_private: bool = False
    """The reader has a cgroup namespace of its own, whose root is shown as /."""


MACHINE: Final = Hierarchy()


def pod_of_cgroup(path: str, where: Hierarchy = MACHINE) -> PodOf:
    """Return the pod of a cgroup's path; UNKNOWN: it may belong to one.

    Of nested pods it is the outermost, which is the one that this node's kubelet manages.
    """
    path = path.removesuffix(_DELETED)
    above = _ABOVE.match(path)
    patterns = _patterns(where.kubelet_root)
    tail = path[above.end() :] if above else path
    for pattern in patterns.outside if above else patterns.inside:
        found = pattern.match(tail)
        if found is not None:
            return _pod(found)
    if _OF_THE_HOST.match(tail):
        return NoPod.HOST
    if not path or above or where.is_private or _may_be_a_pod(path):
        return NoPod.UNKNOWN
    return NoPod.HOST


def unit_of_cgroup(path: str) -> str:
    """Return the system service that a process runs in, without its suffix, which only root names."""
    found = _UNIT.match(path)
    return "" if found is None else found["unit"]


class _Patterns(NamedTuple):
    inside: tuple[re.Pattern[str], ...]
    outside: tuple[re.Pattern[str], ...]
    """Of what follows the way up to an ancestor that the reader shares, which may be any of the pod's."""


@lru_cache(maxsize=8)
def _patterns(kubelet_root: str) -> _Patterns:
    """Return the forms under both cgroup drivers: systemd's slices, and plain directories."""
    names = [name for name in kubelet_root.split("/") if name]
    slices = [*names[-1].removesuffix(".slice").split("-"), "kubepods"] if names else ["kubepods"]
    dashed = re.escape("-".join(slices))
    parents = "".join(f"/{'-'.join(slices[:many])}.slice" for many in range(1, len(slices)))
    below = r"(?P<rest>/[^/]*)?(?:/.*)?$"
    qos = r"(?P<qos>burstable|besteffort)"
    in_slice = rf"/{dashed}(?:-{qos})?-pod{_UID}\.slice"
    of_class = rf"(?:/{dashed}-(?:burstable|besteffort)\.slice)?{in_slice}{below}"
    # Where the runtime has the other driver than the kubelet.
    mixed = rf"/system\.slice/[\w-]+\.service{in_slice}(?P<rest>:[^/]*)(?:/.*)?$"
    plain = re.escape("".join(f"/{name}" for name in [*names, "kubepods"]))
    in_directory = rf"(?:/{qos})?/pod{_UID}{below}"
    return _Patterns(
        inside=(
            re.compile(rf"{re.escape(parents)}/{dashed}\.slice{of_class}"),
            re.compile(rf"(?P<plain>{plain}){in_directory}"),
            re.compile(mixed),
        ),
        outside=(
            re.compile(rf"(?:/{dashed}\.slice)?{of_class}"),
            re.compile(rf"(?P<plain>/kubepods)?{in_directory}"),
            re.compile(mixed),
        ),
    )


def _pod(found: re.Match[str]) -> PodRef:
    groups = found.groupdict()
    # A guaranteed pod has no class in its path, nor has one whose path begins below its class.
    is_whole = groups.get("plain", "") is not None
    qos = found["qos"] or ("guaranteed" if is_whole else None)
    container = _CONTAINER.search(found["rest"] or "")
    return PodRef(
        PodUid(found["uid"].replace("_", "-")), container[0] if container else None, cast("Qos | None", qos)
    )


def _may_be_a_pod(path: str) -> bool:
    """Return whether a path has the name of a pod where no user could have made it."""
    for part in path.split("/"):
        if _LIKE_A_POD.fullmatch(part):
            return True
        if _DELEGATED.search(part):
            return False
    return False
