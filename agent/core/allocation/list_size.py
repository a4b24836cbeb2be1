"""The greatest length of the message that lists a resource's devices.

The kubelet accepts no message over MAX_LIST_BYTES: it would drop the stream and with it the whole resource.
The longest is the one in which every device is Unhealthy, which is also when it matters most.

Sources: grpc-go, defaultClientMaxReceiveMessageSize; the Device message of device plugin v1beta1.
"""

from typing import Final

from agent.model.ids import REPLICA_SEPARATOR

MAX_LIST_BYTES: Final = 4_194_304

_WORD: Final = len("Unhealthy")
_UUID: Final = len("GPU-00000000-0000-4000-8000-000000000000")


def device_bytes(id_length: int, numa_node: int | None) -> int:
    """Return how many bytes of a list one device needs."""
    topology = 0 if numa_node is None else _field(_field(_numa(numa_node)))
    return _field(_field(id_length) + _field(_WORD) + topology)


def replicas_bytes(uuid_length: int, numa_node: int | None, replicas: int) -> int:
    """Return how many bytes of a list the replicas of one device need, numbered from 0."""
    total, first, digits = 0, 0, 1
    while first < replicas:
        end = min(replicas, 10**digits)
        id_length = uuid_length + len(REPLICA_SEPARATOR) + digits
        total += (end - first) * device_bytes(id_length, numa_node)
        first, digits = end, digits + 1
    return total


def least_list_bytes(replicas: int) -> int:
    """Return the least length of a list with so many replicas of a GPU: of one, which is on no NUMA node."""
    return replicas_bytes(_UUID, None, replicas)


def _numa(node: int) -> int:
    # Zero is the default, which protobuf does not encode.
    return 1 + _varint(node) if node else 0


def _field(length: int) -> int:
    """Return the length of a delimited field: one byte of tag, the length, the payload."""
    return 1 + _varint(length) + length


def _varint(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
