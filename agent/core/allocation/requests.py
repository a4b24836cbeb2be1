"""Decides whether a container gets the devices it was allocated, and whether it may start on them.

Invariants: answers come from the snapshot alone, without a driver call or a file. The pod's owner reads a
rejection, so it names the device and the next step.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal

import msgspec

from agent.core.allocation.injection import ContainerAnswer, container_answer, missing_channels, names_nodes
from agent.core.allocation.nodes import unknown_message, unknown_nodes
from agent.core.reasons import REASON_SPECS, advice_of
from agent.core.wording import listed
from agent.model.health import Evidence, Health, Reason
from agent.model.snapshot import Device, Resource, Snapshot

MAX_NAMED: Final = 4
"""Devices that a rejection names; a request may hold thousands of ids, too many for a message."""


class Rejection(msgspec.Struct, frozen=True):
    """Why a request cannot be met."""

    kind: Literal["unknown", "unhealthy", "unsatisfiable", "missing"]
    """``missing``: the node lacks a file that the container needs beside its devices."""
    message: str


def allocate(
    snapshot: Snapshot,
    resource: Resource,
    ids: Sequence[str],
    *,
    annotation_id: str = "",
    absent: Collection[str] = (),
) -> ContainerAnswer | Rejection:
    """Return a container's answer for the devices ``ids`` (duplicates are one).

    For ``annotation_id`` and ``absent`` see ``container_answer``.
    """
    devices = find_devices(resource, ids)
    if isinstance(devices, Rejection):
        return devices
    devices.sort(key=container_order)
    rejection = (
        _too_many(snapshot, resource, devices)
        or _unhealthy(snapshot, devices)
        or _no_channel(snapshot)
        or _no_node(snapshot, devices)
    )
    if rejection is not None:
        return rejection
    return container_answer(snapshot, resource, devices, annotation_id=annotation_id, absent=absent)


def reject_start(snapshot: Snapshot, resource: Resource, ids: Sequence[str]) -> Rejection | None:
    """Return why a container must not start on devices that it was allocated; None: it may.

    Only what a device reports itself counts. An inferred fault, and a device that is not (or no longer)
    known, never keep a container from starting.
    """
    wanted = frozenset(ids)
    for device in resource.devices:
        if device.id not in wanted:
            continue
        for condition in device.reasons:
            if condition.flips and condition.evidence is Evidence.HARD:
                return Rejection(
                    "unhealthy",
                    f"{_named(snapshot, device)} failed after it was allocated: {condition.reason}:"
                    f" {condition.message}; {advice_of(condition)}, or delete the pod so that it is"
                    " allocated another device",
                )
    return None


def find_devices(resource: Resource, ids: Sequence[str]) -> list[Device] | Rejection:
    """Return the devices of ``ids`` in the order asked for, duplicates once, or name the unknown ones."""
    known: dict[str, Device] = {device.id: device for device in resource.devices}
    unknown = [wanted for wanted in dict.fromkeys(ids) if wanted not in known]
    if unknown:
        several = len(unknown) > 1
        return Rejection(
            "unknown",
            f"invalid request: unknown device{'s' if several else ''}: {_listed(unknown)}"
            f" {'are not devices' if several else 'is not a device'} of {resource.name} on this node;"
            " delete the pod so that it is allocated anew",
        )
    return [known[wanted] for wanted in dict.fromkeys(ids)]


def shown(name: str) -> str:
    """Return an id from outside in a form for messages: short, and printable."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= 64 else text[:61] + "..."


def _named(snapshot: Snapshot, device: Device, name: str = "") -> str:
    """Return a device with its GPU by index, or by its last PCI address once it is lost."""
    view = snapshot.view_of(device.placement.gpu)
    if view is None:
        return name or device.id
    place = f"at {view.gpu.pci}" if view.index is None else view.index
    return f"{name or device.id} (GPU {place})"


def _too_many(snapshot: Snapshot, resource: Resource, devices: Sequence[Device]) -> Rejection | None:
    """Return the rejection of a request over the operator's limits on shared devices."""
    sharing = snapshot.policy.sharing
    shares = [device for device in devices if device.replica is not None]
    if sharing.fail_requests_greater_than_one and shares and len(devices) > 1:
        return Rejection(
            "unsatisfiable",
            f'invalid allocation request for "{resource.name}": invalid request: maximum request size for'
            f" shared resources is 1; found {len(devices)}; ask for 1 {resource.name} in each container",
        )
    if sharing.distinct_cards and (twice := _twice(shares)):
        return Rejection(
            "unsatisfiable",
            f"{_named(snapshot, twice[0], twice[0].uuid)} was allocated more than once"
            f" ({_listed([share.id for share in twice])}), and"
            " this node gives a container each card once; delete the pod so that it is allocated anew, or"
            f" ask for fewer {resource.name}",
        )
    return None


def _twice(shares: Sequence[Device]) -> list[Device] | None:
    """Return the shares of the first device that has several among them."""
    of_device: dict[str, list[Device]] = {}
    for share in shares:
        of_device.setdefault(share.uuid, []).append(share)
    return next((listed for listed in of_device.values() if len(listed) > 1), None)


def _listed(ids: Sequence[str]) -> str:
    """Return some of many ids, and how many more there are."""
    named = [shown(each) for each in ids[:MAX_NAMED]]
    more = len(ids) - len(named)
    return listed([*named, f"{more} more"] if more else named, "and")


def _unhealthy(snapshot: Snapshot, devices: Iterable[Device]) -> Rejection | None:
    unhealthy = next((device for device in devices if device.health is not Health.HEALTHY), None)
    return None if unhealthy is None else Rejection("unhealthy", _unhealthy_message(snapshot, unhealthy))


def _no_channel(snapshot: Snapshot) -> Rejection | None:
    """Return the rejection of a request for want of an IMEX channel.

    Where the agent itself requires it, every device is unhealthy already: this is for a caller that asks what
    the answer would be if it were required.
    """
    missing = missing_channels(snapshot.policy.injection, snapshot.control_nodes)
    if not missing:
        return None
    return Rejection(
        "missing",
        f"{missing[0]} is required for every container and does not exist on this node;"
        f" {REASON_SPECS[Reason.IMEX_CHANNEL_MISSING].advice}",
    )


def _no_node(snapshot: Snapshot, devices: Iterable[Device]) -> Rejection | None:
    """Return the rejection for a device with a node of unknown path, where answers have nodes by path."""
    if not names_nodes(snapshot.policy.injection):
        return None
    for device in devices:
        view = snapshot.view_of(device.placement.gpu)
        migs = view.gpu.mig_devices if view is not None else ()
        mig = next((each for each in migs if each.uuid == device.uuid), None)
        if view is not None and (unknown := unknown_nodes(view.gpu, mig)):
            return Rejection(
                "missing",
                f"{_named(snapshot, device)} cannot be given to a container: {unknown_message(unknown)};"
                f" {REASON_SPECS[Reason.DEVICE_NODE_MISSING].advice},"
                " or delete the pod so that it is allocated anew",
            )
    return None


def _unhealthy_message(snapshot: Snapshot, device: Device) -> str:
    if not device.reasons:
        return (
            f"{device.id} has not been probed yet, or not for too long, so it is not known to work;"
            " try again in a moment"
        )
    condition = device.reasons[0]
    return (
        f"{_named(snapshot, device)} is unhealthy: {condition.reason}: {condition.message};"
        f" {advice_of(condition)}, or delete the pod so that it is allocated anew"
    )


def container_order(device: Device) -> tuple[int, int, int, int]:
    """Return the sort key of ``device`` in the stable order: GPU, GPU instance, compute instance, replica."""
    placement = device.placement
    return (device.index, placement.gi, placement.ci, device.replica or 0)
