"""How long the message is that lists a resource's devices, at its longest.

The kubelet takes no message over MAX_LIST_BYTES: it would drop the stream and with it the whole resource.
The longest is the one in which every device is Unhealthy, which is also when it matters most.

Sources: grpc-go, defaultClientMaxReceiveMessageSize; the Device message of device plugin v1beta1.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from agent.core.inventory import offers
from agent.model.gpu import Gpu
from agent.model.policy import Policy

MAX_LIST_BYTES: Final = 4_194_304

_WORD: Final = len("Unhealthy")
_MAX_DEVICE_BYTES: Final = 320
"""More than any device takes, whose id has at most 256 bytes."""


class _Listed(Protocol):
    """What is listed of a device."""

    @property
    def id(self) -> str: ...

    @property
    def numa_node(self) -> int | None: ...


def list_bytes(devices: Iterable[_Listed]) -> int:
    """Return the length in bytes of a list of these devices, all Unhealthy."""
    return sum(_field(_device(len(device.id), device.numa_node)) for device in devices)


def is_too_long(devices: tuple[_Listed, ...]) -> bool:
    """Tell whether the kubelet could not take the list; cheap for lists that are far from it."""
    return len(devices) * _MAX_DEVICE_BYTES > MAX_LIST_BYTES and list_bytes(devices) > MAX_LIST_BYTES


def lists_too_long(gpus: Iterable[Gpu], policy: Policy) -> tuple[str, ...]:
    """Return what a policy would list on these GPUs that the kubelet could not take, each as a sentence."""
    listed = offers(gpus, policy, {})
    return tuple(too_long_message(name, devices) for name, devices in listed.items() if is_too_long(devices))


def too_long_message(name: str, devices: tuple[_Listed, ...]) -> str:
    """Return the sentence on a list that is too long."""
    return (
        f"{name} has {len(devices)} devices, whose list can take {list_bytes(devices)} bytes, and the kubelet"
        f" takes {MAX_LIST_BYTES}; configure fewer replicas"
    )


def _device(id_length: int, numa_node: int | None) -> int:
    topology = 0 if numa_node is None else _field(_field(_numa(numa_node)))
    return _field(id_length) + _field(_WORD) + topology


def _numa(node: int) -> int:
    # Zero is the default, which protobuf leaves out.
    return 1 + _varint(node) if node else 0


def _field(length: int) -> int:
    """Return the length of a delimited field: one byte of tag, the length, the payload."""
    return 1 + _varint(length) + length


def _varint(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
