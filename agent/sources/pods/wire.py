"""One call to the kubelet's pod-resources socket, within bounds, and the parsing of its answer.

Invariants: each call has a connection of its own, because the kubelet creates its socket again whenever it
starts. No more than MAX_ANSWER_BYTES are received, however much the kubelet sends; grpclib itself has no
bound. betterproto2 parses the answer, which takes 9 ms for 110 pods, so not on the loop.

Sources: kubernetes pkg/kubelet/apis/podresources; proto/podresources/v1.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from grpclib.client import Channel, Handler
from grpclib.const import Cardinality, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from grpclib.protocol import H2Protocol

from agent.api.podresources.v1 import AllocatableResourcesResponse, ListPodResourcesResponse
from agent.errors import KubeletError
from agent.model.ids import DeviceId, ResourceName
from agent.unix_channel import UnixChannel

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Of one answer with all its framing: some 100,000 pods."""

_SERVICE: Final = "/v1.PodResourcesLister"
_LIST: Final = "List"
_COUNT: Final = "GetAllocatableResources"

Claims = Mapping[str, frozenset[str]]
"""Device ids by ``namespace/name`` of the pod that the kubelet lists with them."""


class Listing(NamedTuple):
    """The pods that the kubelet lists."""

    names: frozenset[str]
    """``namespace/name`` of every pod, with devices or without."""
    claims: Claims


class AbsentError(KubeletError):
    """The kubelet has no pod-resources socket, or does not listen on it."""


class UnsupportedError(KubeletError):
    """The kubelet does not support this call."""


class _Bytes(CodecBase):
    """Passes messages through, to be parsed elsewhere."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: type[bytes]) -> bytes:  # noqa: ARG002 - grpclib's signature
        return message

    def decode(self, data: bytes, message_type: type[bytes]) -> bytes:  # noqa: ARG002
        return data


class _BoundedProtocol(H2Protocol):
    """grpclib's protocol, closed once it has received too much."""

    received = 0

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        if self.received > MAX_ANSWER_BYTES:
            self.processor.close("The answer is too long")
            return
        super().data_received(data)


class _PodResourcesChannel(UnixChannel):
    """A channel that receives a bounded answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _Bytes())

    def _protocol_factory(self) -> H2Protocol:
        return _BoundedProtocol(Handler(), self._config, self._h2_config)

    @property
    def is_over(self) -> bool:
        """Whether the kubelet sent too much."""
        protocol = self._protocol
        return isinstance(protocol, _BoundedProtocol) and protocol.received > MAX_ANSWER_BYTES


async def list_pods(socket: Path, *, timeout_s: float) -> bytes:
    """Return the answer to List; raises AbsentError, UnsupportedError, KubeletError."""
    return await _answer(socket, _LIST, timeout_s)


async def count_devices(socket: Path, *, timeout_s: float) -> bytes:
    """Return the answer to GetAllocatableResources; raises AbsentError, UnsupportedError, KubeletError."""
    return await _answer(socket, _COUNT, timeout_s)


async def _answer(socket: Path, method: str, timeout_s: float) -> bytes:
    channel = _PodResourcesChannel(socket)
    unanswered = f"The kubelet did not answer {method} on {socket} within {timeout_s:g} s; check its log"
    try:
        async with asyncio.timeout(timeout_s):
            return await _call(channel, method, timeout_s)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise AbsentError(
            f"The kubelet's pod-resources socket {socket} is not there: {error.strerror}"
        ) from None
    except TimeoutError:
        raise KubeletError(unanswered) from None
    except GRPCError as error:
        # The call carries its deadline, so the kubelet's own clock may be the first to notice.
        late = error.status is Status.DEADLINE_EXCEEDED
        raise (KubeletError(unanswered) if late else _error_of(method, error)) from None
    except (StreamTerminatedError, ProtocolError, NotImplementedError):
        what = f"sent over {MAX_ANSWER_BYTES >> 20} MiB" if channel.is_over else "closed the connection"
        raise KubeletError(f"The kubelet {what} in answer to {method} on {socket}") from None
    except BlockingIOError:
        raise KubeletError(
            f"The kubelet accepts no connection on {socket}, whose backlog is full; check whether it hangs"
        ) from None
    except OSError as error:
        raise KubeletError(
            f"Could not connect to {socket}: {error.strerror or error}; mount the kubelet's pod-resources"
        ) from None
    finally:
        channel.close()


async def _call(channel: Channel, method: str, timeout_s: float) -> bytes:
    path = f"{_SERVICE}/{method}"
    async with channel.request(path, Cardinality.UNARY_UNARY, bytes, bytes, timeout=timeout_s) as stream:
        await stream.send_message(b"", end=True)
        answer: bytes | None = await stream.recv_message()
    if answer is None:
        raise StreamTerminatedError("No answer")
    return answer


def _error_of(method: str, error: GRPCError) -> KubeletError:
    if error.status is Status.UNIMPLEMENTED:
        return UnsupportedError(f"The kubelet does not serve {method} of pod-resources v1; it is too old")
    message = f"The kubelet rejected {method}: {error.status.name}: {error.message or 'no message'}"
    # Source: kubernetes pkg/kubelet/apis/podresources/server_v1.go, up to 1.27.
    is_off = error.status is Status.UNKNOWN and (error.message or "").endswith("disabled")
    return UnsupportedError(message) if is_off else KubeletError(message)


def counts_of(answer: bytes, *, prefix: str) -> Mapping[ResourceName, frozenset[DeviceId]]:
    """Return the healthy devices by resource, of those whose names begin with ``prefix``.

    Raises KubeletError if the answer is none to GetAllocatableResources. To be called in a thread.
    """
    try:
        listed = AllocatableResourcesResponse.parse(answer)
    except Exception as error:  # noqa: BLE001 - whatever its reader trips over is the answer's fault
        raise KubeletError(f"The kubelet's answer to {_COUNT} is no list of devices: {error}") from None
    found: dict[ResourceName, set[DeviceId]] = {}
    for entry in listed.devices:
        if entry.resource_name.startswith(prefix):
            ids = found.setdefault(ResourceName(entry.resource_name), set())
            ids.update(DeviceId(device) for device in entry.device_ids)
    return {name: frozenset(ids) for name, ids in found.items()}


def listing_of(answer: bytes, *, prefix: str) -> Listing:
    """Return which pods are listed, and with which devices of resources whose names begin with ``prefix``.

    Raises KubeletError if the answer is no list of pods. To be called in a thread.
    """
    try:
        listed = ListPodResourcesResponse.parse(answer)
    except Exception as error:  # noqa: BLE001 - whatever its reader trips over is the answer's fault
        raise KubeletError(f"The kubelet's answer to List is no list of pods: {error}") from None
    names: set[str] = set()
    claims: dict[str, frozenset[str]] = {}
    for pod in listed.pod_resources:
        name = f"{pod.namespace}/{pod.name}"
        names.add(name)
        ids = frozenset(
            device
            for container in pod.containers
            for entry in container.devices
            if entry.resource_name.startswith(prefix)
            for device in entry.device_ids
        )
        if ids:
            claims[name] = claims.get(name, frozenset()) | ids
    return Listing(frozenset(names), claims)
