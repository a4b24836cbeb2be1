"""Finds the listed pods that have finished, by their cgroups: kubelets up to 1.33 list them like others.

The kubelet keeps a cgroup for each pod from before its containers start until they have stopped. So a pod
without a cgroup has not started or has finished, and one that has not started has a cgroup by the
next list. Where the kubelet's cgroups are not visible, as in a cgroup namespace, no pod counts as finished.

Sources: kubernetes pkg/kubelet/cm/pod_container_manager_linux.go, cgroup_manager_linux.go.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from agent.model.usage import Pods, PodUid

_QOS: Final = ("", "burstable", "besteffort")


class FinishedPods:
    """Finds the pods that had no cgroup at the newest list and at the one before."""

    def __init__(self, cgroups: Path, *, kubelet_root: str = "/") -> None:
        """``cgroups`` is where the hierarchy is mounted, ``kubelet_root`` the kubelet's --cgroup-root."""
        self._cgroups = cgroups
        self._names = [name for name in kubelet_root.split("/") if name]
        self._without: frozenset[str] = frozenset()

    def forget(self) -> None:
        """Forget the list before."""
        self._without = frozenset()

    def after(self, listed: Iterable[str], pods: Pods) -> frozenset[str]:
        """Return which of the listed pods, ``namespace/name``, have finished. Blocks for a few reads."""
        roots = [root for root in self._roots() if root.is_dir()]
        uids: dict[str, list[PodUid]] = {}
        for uid, seen in pods.items():
            if seen.alive:
                uids.setdefault(seen.full_name, []).append(uid)
        without = frozenset(name for name in listed if roots and _is_without(uids.get(name, ()), roots))
        finished, self._without = without & self._without, without
        return finished

    def _roots(self) -> Iterator[Path]:
        """Yield where the kubelet may have its cgroups: slices of systemd or directories, v2 and v1."""
        above = self._names[-1].removesuffix(".slice").split("-") if self._names else []
        slices = [*above, "kubepods"]
        in_slices = [f"{'-'.join(slices[:many])}.slice" for many in range(1, len(slices) + 1)]
        for hierarchy in (self._cgroups, self._cgroups / "pids"):
            yield hierarchy.joinpath(*in_slices)
            yield hierarchy.joinpath(*self._names, "kubepods")


def _is_without(uids: Iterable[PodUid], roots: Iterable[Path]) -> bool:
    """Return whether none of the pods of a name has a cgroup; False where no UID of it is known."""
    known = tuple(uids)
    return bool(known) and not any(path.exists() for uid in known for path in _paths(uid, roots))


def _paths(uid: PodUid, roots: Iterable[Path]) -> Iterator[Path]:
    for root in roots:
        for qos in _QOS:
            if root.suffix == ".slice":
                of_class = f"{root.stem}-{qos}" if qos else root.stem
                parent = root / f"{of_class}.slice" if qos else root
                yield parent / f"{of_class}-pod{uid.replace('-', '_')}.slice"
            else:
                yield root / qos / f"pod{uid}"
