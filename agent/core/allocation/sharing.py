"""How many replicas a device has: which share is its, and what MPS can serve.

Invariants: which share a device has depends only on what never changes while the node is up, so a lost GPU
moves nobody's replicas: an index counts the known GPUs by PCI address, which is NVML's order while none
is missing.
"""

from typing import Final

from agent.model.gpu import Gpu
from agent.model.ids import ResourceName
from agent.model.sharing import SHARED_SUFFIX, Share, Sharing

MPS_CLIENTS: Final = 48
MPS_CLIENTS_OF_OLDER: Final = 16
"""Clients of one MPS server, so replicas of one GPU: on compute capability 7.5 and later, and before that.
Source: NVIDIA/k8s-device-plugin:cmd/mps-control-daemon/mps/device.go."""

_FIRST_WITH_MANY: Final = (7, 5)


def share_of(sharing: Sharing, resource: ResourceName, gpu: Gpu, place: int) -> Share | None:
    """Return the share of a resource's devices on a GPU, whether or not it can be had; None: there is none.

    ``place`` is the GPU's among the known ones, by PCI address.
    """
    return next((share for share in sharing.shares if _is_of(share, resource, gpu, place)), None)


def _is_of(share: Share, resource: ResourceName, gpu: Gpu, place: int) -> bool:
    if share.resource != resource:
        return False
    if share.models and not any(_matches(pattern, gpu.name) for pattern in share.models):
        return False
    return not share.gpus or str(place) in share.gpus or gpu.uuid in share.gpus


def _matches(pattern: str, name: str) -> bool:
    """Match a pattern in which ``*`` is any text; in one pass, since an operator may write many of them."""
    first, *further = pattern.split("*")
    if not further:
        return pattern == name
    *inner, last = further
    if len(first) + len(last) > len(name) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for text in inner:
        found = name.find(text, at, end)
        if found < 0:
            return False
        at = found + len(text)
    return True


def shared_name(sharing: Sharing, resource: ResourceName) -> ResourceName:
    """Return under which name the shared devices of a resource are offered."""
    return ResourceName(resource + SHARED_SUFFIX) if sharing.rename_by_default else resource


def mps_clients(gpu: Gpu) -> int:
    """Return how many clients MPS serves on a GPU; few where its compute capability is not known."""
    capability = gpu.compute_capability
    return MPS_CLIENTS if capability is not None and capability >= _FIRST_WITH_MANY else MPS_CLIENTS_OF_OLDER
