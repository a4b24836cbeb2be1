"""Reads the UIDs of pods from the kubelet's own files: its PodResources API names pods without UIDs.

The kubelet creates ``<namespace>_<name>_<uid>`` for each pod's logs, and removes it a while after the pod.
Where that directory is not visible, its checkpoint names the UIDs of pods with devices, and the devices
identify the pod of the list.

Invariants: reads are bounded, and an invalid name is skipped. A pod is alive iff the kubelet lists
it; of several UIDs under one name, which recreated pods leave behind, only the newest can be alive.

Sources: kubernetes pkg/kubelet/kuberuntime/helpers.go (BuildPodLogsDirectory), pkg/kubelet/cm/devicemanager/
checkpoint/checkpoint.go.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.model.usage import Pods, PodSeen, PodUid
from agent.sources.pods.wire import Claims

MAX_PODS: Final = 4_096
"""Directories of pods that are read; a node has a few hundred at most."""

MAX_CHECKPOINT_BYTES: Final = 16 * 1024 * 1024


class _Directory(NamedTuple):
    namespace: str
    name: str
    uid: PodUid
    changed_ns: int


class SeenPods(NamedTuple):
    """The pods of the node by UID."""

    pods: Pods
    complete: bool
    """False: the checkpoint was read, which names only pods with devices."""


def pods_by_uid(
    listed: Collection[str],
    claims: Claims,
    *,
    pod_logs: Path,
    checkpoint: Path,
    max_pods: int = MAX_PODS,
) -> SeenPods | None:
    """Return the pods of the node by UID; None where neither file can be read, or there are more. Blocks.

    ``listed`` are the ``namespace/name`` of every pod that the kubelet has now.
    """
    directories = _pod_directories(pod_logs, max_pods)
    if directories is not None:
        if len(directories) > max_pods:
            # Pods that were not read are not gone.
            return None
        return SeenPods(dict(_of_directories(directories, listed)), complete=True)
    devices = _devices_by_uid(checkpoint)
    return None if devices is None else SeenPods(dict(_of_devices(devices, claims)), complete=False)


def _of_directories(
    directories: Collection[_Directory], listed: Collection[str]
) -> Iterator[tuple[PodUid, PodSeen]]:
    newest: dict[tuple[str, str], int] = {}
    for found in directories:
        name = (found.namespace, found.name)
        newest[name] = max(newest.get(name, 0), found.changed_ns)
    for found in directories:
        is_newest = found.changed_ns == newest[found.namespace, found.name]
        is_listed = f"{found.namespace}/{found.name}" in listed
        yield found.uid, PodSeen(found.namespace, found.name, alive=is_newest and is_listed)


def _pod_directories(pod_logs: Path, max_pods: int) -> tuple[_Directory, ...] | None:
    """Return the directories of pods, at most one above the bound; None where they cannot be read."""
    found: list[_Directory] = []
    try:
        with os.scandir(pod_logs) as entries:
            for entry in entries:
                if len(found) > max_pods:
                    break
                # A Kubernetes name holds no underscore.
                parts = entry.name.split("_")
                if len(parts) == 3 and all(parts):
                    found.append(_Directory(parts[0], parts[1], PodUid(parts[2].lower()), _changed_ns(entry)))
    except OSError:
        return None
    return tuple(found)


def _changed_ns(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        # It was removed meanwhile.
        return 0


def _of_devices(devices: Mapping[PodUid, frozenset[str]], claims: Claims) -> Iterator[tuple[PodUid, PodSeen]]:
    for uid, held in devices.items():
        names = [name for name, claimed in claims.items() if held and held <= claimed]
        if len(names) == 1:
            namespace, _, name = names[0].partition("/")
            yield uid, PodSeen(namespace, name)


def _devices_by_uid(checkpoint: Path) -> Mapping[PodUid, frozenset[str]] | None:
    try:
        with checkpoint.open("rb") as file:
            document: Any = json.loads(file.read(MAX_CHECKPOINT_BYTES))
        found: dict[PodUid, frozenset[str]] = {}
        for entry in (document["Data"]["PodDeviceEntries"] or ())[:MAX_PODS]:
            uid = PodUid(str(entry["PodUID"]).lower())
            ids = frozenset(str(device) for listed in entry["DeviceIDs"].values() for device in listed)
            found[uid] = found.get(uid, frozenset()) | ids
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found
