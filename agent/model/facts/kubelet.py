"""How the agent stands with the kubelet: its socket, ours, registrations and streams."""

from collections.abc import Mapping
from typing import Literal

from agent.model.facts.message import DEVICE_PLUGIN, KUBELET, KUBELET_COUNT, ResourceState, State
from agent.model.ids import DeviceId, ResourceName, SocketIdentity, SourceName


class KubeletSocketSeen(State, frozen=True):
    """The kubelet's socket as it is now; None: there is none."""

    identity: SocketIdentity | None
    source: SourceName = KUBELET


class WatchedDirectoryDeleted(State, frozen=True):
    """The device-plugins directory was deleted; only a new process can write the one in its place."""

    path: str
    source: SourceName = KUBELET


class OwnSocketLost(ResourceState, frozen=True):
    """The file of a plugin socket that we serve was deleted or replaced."""

    source: SourceName = KUBELET


class RegisterSent(ResourceState, frozen=True):
    """Register was sent to a kubelet, which may take as long as it likes to answer."""

    kubelet: SocketIdentity
    """The kubelet socket that was connected to."""
    socket: SocketIdentity
    """Our own socket file, for its watch."""
    source: SourceName = DEVICE_PLUGIN


class Registered(ResourceState, frozen=True):
    """The kubelet accepted a registration."""

    kubelet: SocketIdentity
    """The kubelet socket that was connected to."""
    socket: SocketIdentity
    """Our own socket file, for its watch."""
    source: SourceName = DEVICE_PLUGIN


RegistrationFailure = Literal["absent", "unreachable", "rejected", "socket_in_use", "not_served"]
"""absent: no kubelet.sock; unreachable: connection refused or no answer; rejected: Register
answered an error; socket_in_use: something that is not ours has our socket's path; not_served: our
own server could not start (no file descriptors, no room, no rights)."""


class RegistrationFailed(ResourceState, frozen=True):
    """A registration was not made."""

    failure: RegistrationFailure
    message: str
    source: SourceName = DEVICE_PLUGIN


class WatchersChanged(ResourceState, frozen=True):
    """So many ListAndWatch streams of a resource are open now; emitted at each start and end."""

    live: int
    source: SourceName = DEVICE_PLUGIN


class SocketFreed(ResourceState, frozen=True):
    """The other process that served our socket's path does so no more."""

    source: SourceName = DEVICE_PLUGIN


class ListWritten(ResourceState, frozen=True):
    """A list of devices was written to a ListAndWatch stream."""

    healthy: frozenset[DeviceId]
    source: SourceName = DEVICE_PLUGIN


class KubeletCounted(State, frozen=True):
    """The healthy devices that the kubelet has by its own account, of every resource."""

    healthy: Mapping[ResourceName, frozenset[DeviceId]]
    asked_ns: int
    """When it was asked; what it was sent since may be in here or not."""
    source: SourceName = KUBELET_COUNT


KubeletFact = (
    KubeletSocketSeen
    | WatchedDirectoryDeleted
    | OwnSocketLost
    | RegisterSent
    | Registered
    | RegistrationFailed
    | WatchersChanged
    | SocketFreed
    | ListWritten
    | KubeletCounted
)
