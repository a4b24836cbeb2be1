"""The device plugin's messages as bytes.

Requests are read by a small reader of our own: betterproto2 spends seconds on a hostile megabyte
(0.3 s for 80 kB of empty submessages), accepts fields that are cut short, and takes 3.5 ms for the
800 ids of a large node. This one is strict, bounded and a tenth of that. Unknown fields are skipped.

What we send is encoded by betterproto2, each piece once. Two encoded messages put together are one
message with the fields of both (protobuf's encoding guide, "Last One Wins"), so a list is a join.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from agent.api.deviceplugin.v1beta1 import (
    CdiDevice,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    Device,
    DevicePluginOptions,
    DeviceSpec,
    NumaNode,
    TopologyInfo,
)
from agent.api.deviceplugin.v1beta1 import Mount as WireMount
from agent.core.allocation.injection import ContainerAnswer, DeviceNode, Mount
from agent.model.health import Health
from agent.model.snapshot import Device as AdvertisedDevice

API_VERSION: Final = "v1beta1"
HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

MAX_CONTAINERS: Final = 64
"""Containers in one request; the kubelet asks for one at a time."""
MAX_IDS: Final = 131_072
"""Device ids in one request; the kubelet names each free share of a node at most once, and a list that it
accepts has fewer."""
MAX_ID_BYTES: Final = 256
"""Length of a device id; ours have at most 50."""
MAX_FIELDS: Final = 150_000
"""Fields in one request, unknown ones too."""
MAX_CACHED_PIECES: Final = 4_096
"""Encoded pieces of lists kept, of each kind."""
MAX_CACHED_ANSWER_PIECES: Final = 512
"""Encoded pieces of answers kept, of each kind; which devices go together hardly ever repeats."""

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5


def options(*, pre_start: bool) -> DevicePluginOptions:
    """Return the options the kubelet reads; ``pre_start``: it asks before each container starts."""
    return DevicePluginOptions(pre_start_required=pre_start, get_preferred_allocation_available=True)


class RequestError(Exception):
    """A request is no protobuf message, or over a bound; the message names which."""


class PreferredRequest(msgspec.Struct, frozen=True):
    """What the kubelet asks for one container."""

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


def read_allocate_request(data: bytes) -> list[tuple[str, ...]]:
    """Return the device ids of each container; RequestError if that cannot be."""
    budget = _Budget()
    return [tuple(_ids(budget, payload, 1)) for payload in _containers(budget, data)]


def read_pre_start_request(data: bytes) -> tuple[str, ...]:
    """Return the device ids of the container that is to start; RequestError if that cannot be."""
    return tuple(_ids(_Budget(), data, 1))


def read_preferred_request(data: bytes) -> list[PreferredRequest]:
    """Return what is asked for each container; RequestError if that cannot be."""
    budget = _Budget()
    requests = []
    for payload in _containers(budget, data):
        available: list[str] = []
        must_include: list[str] = []
        size = 0
        for number, value in _fields(budget, payload):
            if number in {1, 2} and isinstance(value, bytes):
                (available if number == 1 else must_include).append(budget.id(value))
            elif number == 3 and isinstance(value, int):
                size = _int32(value)
        requests.append(PreferredRequest(tuple(available), tuple(must_include), size))
    return requests


class _Budget:
    """What one request may still hold."""

    def __init__(self) -> None:
        self.fields = MAX_FIELDS
        self.ids = MAX_IDS

    def id(self, raw: bytes) -> str:
        """Return a device id."""
        self.ids -= 1
        if self.ids < 0:
            raise RequestError(f"the request names more than {MAX_IDS} devices")
        if len(raw) > MAX_ID_BYTES:
            raise RequestError(f"a device id is longer than {MAX_ID_BYTES} bytes")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise RequestError("a device id is not valid UTF-8") from None


def _containers(budget: _Budget, data: bytes) -> list[bytes]:
    payloads = [value for number, value in _fields(budget, data) if number == 1 and isinstance(value, bytes)]
    if len(payloads) > MAX_CONTAINERS:
        raise RequestError(f"the request is for more than {MAX_CONTAINERS} containers")
    return payloads


def _ids(budget: _Budget, data: bytes, wanted: int) -> Iterator[str]:
    for number, value in _fields(budget, data):
        if number == wanted and isinstance(value, bytes):
            yield budget.id(value)


def _fields(budget: _Budget, data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield number and value of each field: bytes for delimited ones, an integer for varints."""
    position = 0
    while position < len(data):
        budget.fields -= 1
        if budget.fields < 0:
            raise RequestError(f"the request holds more than {MAX_FIELDS} fields")
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise RequestError("the request is not a protobuf message")
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if kind == _DELIMITED:
            length, position = _varint(data, position)
        elif kind in {_FIXED64, _FIXED32}:
            length = 8 if kind == _FIXED64 else 4
        else:
            raise RequestError("the request is not a protobuf message")
        start, position = position, position + length
        if position > len(data):
            raise RequestError("the request is cut short")
        if kind == _DELIMITED:
            yield number, data[start:position]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise RequestError("the request is cut short")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise RequestError("the request is not a protobuf message")


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def encode_list(devices: Iterable[AdvertisedDevice]) -> bytes:
    """Return a ListAndWatchResponse of all devices, in their order."""
    return b"".join(
        [_device(device.id, device.health is Health.HEALTHY, device.numa_node) for device in devices]
    )


@lru_cache(maxsize=MAX_CACHED_PIECES)
def _device(device_id: str, is_healthy: bool, numa_node: int | None) -> bytes:  # noqa: FBT001 - a cache key
    # The id is put together by hand: encoding 800 new devices would hold up the loop otherwise.
    return _delimited(1, _delimited(1, device_id.encode()) + _device_state(is_healthy, numa_node))


@lru_cache(maxsize=MAX_CACHED_PIECES)
def _device_state(is_healthy: bool, numa_node: int | None) -> bytes:  # noqa: FBT001 - a cache key
    topology = None if numa_node is None else TopologyInfo(nodes=[NumaNode(id=numa_node)])
    return bytes(Device(health=HEALTHY if is_healthy else UNHEALTHY, topology=topology))


def encode_allocate_response(answers: Iterable[ContainerAnswer]) -> bytes:
    """Return an AllocateResponse."""
    return b"".join([_delimited(1, _container_answer(answer)) for answer in answers])


def _container_answer(answer: ContainerAnswer) -> bytes:
    pieces = [_env(name, value) for name, value in answer.envs.items()]
    pieces += map(_mount, answer.mounts)
    pieces += map(_device_spec, answer.device_nodes)
    pieces += map(_cdi_device, answer.cdi_devices)
    if answer.annotations:
        # Each has a key that is never used again, so it is not worth keeping.
        pieces.append(bytes(ContainerAllocateResponse(annotations=dict(answer.annotations))))
    return b"".join(pieces)


@lru_cache(maxsize=MAX_CACHED_ANSWER_PIECES)
def _env(name: str, value: str) -> bytes:
    return bytes(ContainerAllocateResponse(envs={name: value}))


@lru_cache(maxsize=MAX_CACHED_ANSWER_PIECES)
def _mount(mount: Mount) -> bytes:
    wire = WireMount(
        container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only
    )
    return bytes(ContainerAllocateResponse(mounts=[wire]))


@lru_cache(maxsize=MAX_CACHED_ANSWER_PIECES)
def _cdi_device(name: str) -> bytes:
    return bytes(ContainerAllocateResponse(cdi_devices=[CdiDevice(name=name)]))


@lru_cache(maxsize=MAX_CACHED_ANSWER_PIECES)
def _device_spec(node: DeviceNode) -> bytes:
    spec = DeviceSpec(
        container_path=node.container_path, host_path=node.host_path, permissions=node.permissions
    )
    return bytes(ContainerAllocateResponse(devices=[spec]))


def encode_preferred_response(choices: Iterable[Sequence[str]]) -> bytes:
    """Return a PreferredAllocationResponse."""
    return b"".join(
        [
            _delimited(1, bytes(ContainerPreferredAllocationResponse(device_i_ds=list(choice))))
            for choice in choices
        ]
    )


def _delimited(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field of a low number."""
    return bytes((number << 3 | _DELIMITED,)) + _length(len(payload)) + payload


def _length(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
