"""The driver's calls as a program makes them: one function for each, on a descriptor.

Every call raises CallRejected where the driver rejects it, OSError where the system call fails.
"""

import fcntl
import os
import struct
from array import array
from pathlib import Path
from typing import Final

from agent.simulation.driver_double import abi

_UNCHANGED: Final = 0xFFFF
"""A status that no call returns, to see that one was written."""


class CallRejected(Exception):  # noqa: N818 - it is a status, not an error of ours
    """The driver answered a status other than 0."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} was rejected with status {status:#x}")
        self.status = status


class Caller:
    """Makes calls in the layout of one version of the driver."""

    def __init__(self, folder: str, version: str) -> None:
        self._folder = Path(folder)
        self._layout = abi.layout(version)

    def open(self, name: str, *, close_on_exec: bool = True) -> int:
        """Open a node; libcuda leaves nvidiactl open over an exec."""
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        os.set_inheritable(descriptor, not close_on_exec)
        return descriptor

    def plain(self, descriptor: int, number: int, size: int) -> None:
        """Make a call that has no status."""
        fcntl.ioctl(descriptor, abi.command(number, size), bytearray(size))

    def register(self, descriptor: int, control: int) -> None:
        """Register a nvidiaN to a nvidiactl."""
        fcntl.ioctl(descriptor, abi.command(abi.REGISTER_FD, 4), bytearray(struct.pack("=i", control)))

    def allocate_client(self, descriptor: int) -> int:
        """Return a new client."""
        return self.allocate(descriptor, 0, 0, 0, abi.ROOT_CLIENT)

    def allocate_device(self, descriptor: int, client: int, handle: int, instance: int) -> int:
        """Return a device of the RM's instance."""
        parameters = array("I", [instance, *[0] * 13])
        address, _ = parameters.buffer_info()
        return self.allocate(descriptor, client, client, handle, abi.DEVICE, address)

    def allocate(
        self, descriptor: int, client: int, parent: int, handle: int, rm_class: int, parameters: int = 0
    ) -> int:
        """Return a new object's handle; the RM chooses it for a handle of 0."""
        size, status_at = self._layout.nvos64_size, self._layout.nvos64_status
        data = bytearray(size)
        abi.ALLOC_HEAD.pack_into(data, 0, client, parent, handle, rm_class, parameters)
        struct.pack_into("=I", data, status_at, _UNCHANGED)
        fcntl.ioctl(descriptor, abi.command(abi.ALLOC, size), data)
        _check_status("RM_ALLOC", data, status_at)
        return int(abi.ALLOC_HEAD.unpack_from(data)[2])

    def free(self, descriptor: int, client: int, parent: int, handle: int) -> None:
        """End an object and what is below it."""
        data = bytearray(abi.FREE_STRUCT.pack(client, parent, handle, _UNCHANGED))
        fcntl.ioctl(descriptor, abi.command(abi.FREE, abi.FREE_STRUCT.size), data)
        _check_status("RM_FREE", data, 12)

    def duplicate(
        self, descriptor: int, client: int, parent: int, handle: int, source_client: int, source: int
    ) -> int:
        """Return a copy of another client's object."""
        data = bytearray(abi.DUP_STRUCT.pack(client, parent, handle, source_client, source, 0, _UNCHANGED))
        fcntl.ioctl(descriptor, abi.command(abi.DUP_OBJECT, abi.DUP_STRUCT.size), data)
        _check_status("RM_DUP_OBJECT", data, 24)
        return int(abi.DUP_STRUCT.unpack(data)[2])

    def control(self, descriptor: int, client: int, handle: int, command: int) -> None:
        """Make a control without parameters."""
        data = bytearray(abi.CONTROL_STRUCT.pack(client, handle, command, 0, 0, 0, _UNCHANGED))
        fcntl.ioctl(descriptor, abi.command(abi.CONTROL, abi.CONTROL_STRUCT.size), data)
        _check_status("RM_CONTROL", data, 28)

    def allocate_memory(self, descriptor: int, client: int, parent: int, handle: int) -> None:
        """Have memory allocated, through a nvidiaN."""
        data = bytearray(abi.ALLOC_MEMORY_BYTES)
        struct.pack_into("=IIII", data, 0, client, parent, handle, abi.MEMORY_SYSTEM)
        struct.pack_into("=I", data, abi.ALLOC_MEMORY_STATUS, _UNCHANGED)
        fcntl.ioctl(descriptor, abi.command(abi.ALLOC_MEMORY, len(data)), data)
        _check_status("RM_ALLOC_MEMORY", data, abi.ALLOC_MEMORY_STATUS)

    def unified(self, descriptor: int, command: int, head: bytes = b"") -> None:
        """Make a call on nvidia-uvm with what its struct begins with."""
        status_at = self._layout.uvm_status(command)
        data = bytearray(head.ljust(status_at, b"\0") + struct.pack("=I", _UNCHANGED))
        fcntl.ioctl(descriptor, command, data)
        _check_status(f"UVM command {command}", data, status_at)

    def unregister_channel(self, descriptor: int, gpu: bytes, client: int, channel: int) -> None:
        """Take a channel out of unified memory."""
        words = struct.pack("=II", client, channel)
        head = gpu[: self._layout.unregister_channel_status - len(words)] + words
        self.unified(descriptor, abi.UVM_UNREGISTER_CHANNEL, head)


def _check_status(call: str, data: bytearray, status_at: int) -> None:
    (status,) = struct.unpack_from("=I", data, status_at)
    if status != abi.OK:
        raise CallRejected(call, status)
