"""The kubelet's checkpoint file, in its shape. Source: kubernetes pkg/kubelet/cm/devicemanager/checkpoint.

The checksum's place is the kubelet's; its value is a CRC-32 of our JSON, because the kubelet's is of a
dump of Go structures, which only a kubelet can make.
"""

import base64
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent.simulation.kubelet.pods import Grant, Pod

FILE_NAME: Final = "kubelet_internal_checkpoint"

_NO_NUMA: Final = -1


def write_checkpoint(directory: Path, pods: Iterable[Pod], registered: Mapping[str, Sequence[str]]) -> None:
    """Replace the file in one step; the temporary name is in the watched folder, as the kubelet's is."""
    entries = [
        _entry(pod, container, resource, grant)
        for pod in pods
        if pod.active
        for container, grants in pod.grants.items()
        for resource, grant in grants.items()
    ]
    data = {
        "PodDeviceEntries": entries or None,
        "RegisteredDevices": {key: list(ids) for key, ids in registered.items()},
    }
    encoded = json.dumps(data, separators=(",", ":"))
    document = f'{{"Data":{encoded},"Checksum":{zlib.crc32(encoded.encode())}}}'
    temporary = directory / f".{FILE_NAME}{os.getpid()}"
    temporary.write_text(document)
    temporary.replace(directory / FILE_NAME)


def read_registered(directory: Path) -> tuple[str, ...]:
    """Return the resources an earlier kubelet knew; none where the file is missing or broken."""
    try:
        document: Any = json.loads((directory / FILE_NAME).read_bytes())
        return tuple(str(name) for name in document["Data"]["RegisteredDevices"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _entry(pod: Pod, container: str, resource: str, grant: Grant) -> dict[str, object]:
    by_node: dict[str, list[str]] = {}
    for id_ in grant.ids:
        for node in grant.numa.get(id_) or (_NO_NUMA,):
            by_node.setdefault(str(node), []).append(id_)
    return {
        "PodUID": pod.uid,
        "ContainerName": container,
        "ResourceName": resource,
        "DeviceIDs": by_node,
        "AllocResp": base64.b64encode(grant.answer.SerializeToString()).decode(),
    }
