"""What nvidia-uvm answers: which GPUs and VA spaces each open file of it has registered.

Its commands are plain numbers, so their structs are read and written through the caller's memory.
Sources: open-gpu-kernel-modules, uvm.c, uvm_va_space.c.
"""

import errno
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agent.simulation.driver_double import abi
from agent.simulation.driver_double.caller import read_memory, write_memory
from agent.simulation.driver_double.fuse import Ioctl, IoctlAnswer
from agent.simulation.driver_double.nodes import Gpu
from agent.simulation.driver_double.resources import ResourceManager

_OF_CHANNELS = frozenset({abi.UVM_REGISTER_CHANNEL, abi.UVM_UNREGISTER_CHANNEL})


@dataclass(slots=True)
class _Registered:
    gpus: set[bytes] = field(default_factory=set)
    spaces: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class UnifiedMemory:
    """State of every open file on which INITIALIZE was called; channels and ranges are not kept."""

    def __init__(self, gpus: Sequence[Gpu], rm: ResourceManager, layout: abi.Layout) -> None:
        self._uuids = frozenset(gpu.raw_uuid for gpu in gpus)
        self._rm = rm
        self._layout = layout
        self._files: dict[int, _Registered] = {}

    def ioctl(self, call: Ioctl) -> IoctlAnswer:
        """Answer a command; one that changes nothing here succeeds. Raises OSError."""
        if call.command == abi.UVM_DEINITIALIZE:
            self.released(call.file)
        try:
            status_at = self._layout.uvm_status(call.command)
        except KeyError:
            return IoctlAnswer()
        try:
            status = struct.pack("=I", self._status(call))
            write_memory(call.thread, call.argument + status_at, status)
        except OSError as error:
            raise OSError(errno.EFAULT, "the caller's memory cannot be used") from error
        return IoctlAnswer()

    def released(self, file: int) -> None:
        """End what belongs to an open file."""
        self._files.pop(file, None)

    def spaces(self) -> Iterator[tuple[bytes, int, int]]:
        """Return GPU, client and VA space of everything that is registered."""
        for registered in self._files.values():
            for uuid, (client, space) in registered.spaces.items():
                yield uuid, client, space

    def _status(self, call: Ioctl) -> int:
        if call.command == abi.UVM_INITIALIZE:
            self._files.setdefault(call.file, _Registered())
        if call.command in {abi.UVM_INITIALIZE, abi.UVM_MM_INITIALIZE}:
            return abi.OK
        registered = self._files.get(call.file)
        if registered is None:
            return abi.ILLEGAL_ACTION
        return abi.OK if call.command in _OF_CHANNELS else self._of_gpu(call, registered)

    def _of_gpu(self, call: Ioctl, registered: _Registered) -> int:
        uuid = read_memory(call.thread, call.argument, abi.UVM_UUID_BYTES)
        if uuid not in self._uuids:
            return abi.INVALID_DEVICE
        match call.command:
            case abi.UVM_REGISTER_GPU:
                registered.gpus.add(uuid)
            case abi.UVM_UNREGISTER_GPU:
                registered.gpus.discard(uuid)
                registered.spaces.pop(uuid, None)
            case abi.UVM_UNREGISTER_GPU_VASPACE:
                return abi.OK if registered.spaces.pop(uuid, None) else abi.INVALID_DEVICE
            case _:
                return self._register_space(call, registered, uuid)
        return abi.OK

    def _register_space(self, call: Ioctl, registered: _Registered, uuid: bytes) -> int:
        """Register a VA space, once for each GPU. Source: uvm_va_space.c, check_gpu_va_space."""
        raw = read_memory(call.thread, call.argument, abi.VASPACE_STRUCT.size)
        _, _, client, space, _ = abi.VASPACE_STRUCT.unpack(raw)
        if uuid not in registered.gpus or uuid in registered.spaces:
            return abi.INVALID_DEVICE
        if not self._rm.has(client, space):
            return abi.INVALID_CLIENT
        registered.spaces[uuid] = (client, space)
        return abi.OK
