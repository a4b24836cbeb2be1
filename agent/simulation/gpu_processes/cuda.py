"""The calls of a CUDA program: cuInit, cuCtxCreate, cuCtxDestroy, in the numbers seen of libcuda.

Seen on an H100 with driver 535.104.05: cuInit makes 10 allocations, 69 controls, 1 free and opens nvidiaN
five times, nvidiactl and nvidia-uvm twice; cuCtxCreate makes 106 allocations (9 channel groups, 37 channels,
36 engine objects, one context share below the first group), 182 controls, 68 and 37 calls for memory, 37 for
unified memory, and opens nvidiaN 13 times and nvidiactl 7 times. What cuCtxDestroy frees is inferred: the
channel groups and what stands beside them. Which controls they are does not matter here.
"""

import os
import struct
from dataclasses import dataclass, field
from typing import Final

from agent.simulation.driver_double import abi
from agent.simulation.driver_double.nodes import CONTROL, UVM, Gpu
from agent.simulation.gpu_processes.calls import Caller

GROUPS: Final = 9
CHANNELS: Final = 37
ENGINES: Final = 36
EVENTS: Final = 13
OTHER_OBJECTS: Final = 9
CREATE_CONTROLS: Final = 182
INIT_CONTROLS: Final = 69
HEAP_CALLS: Final = 68
MEMORY_CALLS: Final = 37
GPU_OPENS: Final = 13
CONTROL_OPENS: Final = 7

_FIRST_HANDLE: Final = 0x5C000001
"""libcuda chooses its own handles, and uses them again."""
_BUILD_VERSION: Final = 0x101
_SHARE_POLICY: Final = 0xD04
_ATTACH_IDS: Final = 0x215
_SCHEDULE: Final = 0xA06C0101
_WORK_TOKEN: Final = 0xC36F0108
_EXCEPTION_MASK: Final = 0x83DE0309
_ANY_CONTROL: Final = 0x20800102


@dataclass(slots=True)
class _Device:
    gpu: Gpu
    handle: int
    space: int
    node: int
    """The descriptor through which memory is allocated."""
    has_space: bool = False
    """The VA space is registered with unified memory."""


@dataclass(slots=True)
class _Context:
    device: _Device
    objects: list[int] = field(default_factory=list)
    """What is freed, with all that is below it."""
    channels: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)


class Cuda:
    """What one process has of CUDA."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._control = -1
        self._client = 0
        self._uvm = -1
        self._files: set[int] = set()
        self._devices: dict[int, _Device] = {}
        self._contexts: list[_Context] = []
        self._free_handles: list[int] = []
        self._next_handle = _FIRST_HANDLE

    def contexts_on(self, minor: int | None) -> int:
        """How many contexts were created on a GPU or (None) on all, and not destroyed."""
        return sum(minor in {None, context.device.gpu.minor} for context in self._contexts)

    @property
    def files(self) -> tuple[int, ...]:
        """Every descriptor of the driver, nvidiactl first."""
        mine = [each for context in self._contexts for each in context.files]
        return tuple(each for each in (self._control, *sorted({*self._files, *mine})) if each >= 0)

    def create(self, gpu: Gpu) -> None:
        """Create a context, as cuCtxCreate; the first one on a GPU initialises it."""
        if self._control < 0:
            self._initialise()
        device = self._devices.get(gpu.minor) or self._add_device(gpu)
        context = _Context(device)
        self._contexts.append(context)
        self._register_space(device)
        self._open_files(context)
        self._allocate_channels(context)
        self._allocate_others(context)
        for _ in range(HEAP_CALLS):
            self._caller.plain(self._control, abi.VID_HEAP_CONTROL, abi.VID_HEAP_BYTES)
        for _ in range(MEMORY_CALLS):
            self._caller.allocate_memory(device.node, self._client, device.handle, 0)
        self._controls(CREATE_CONTROLS - GROUPS - CHANNELS - 1)

    def destroy(self, minor: int | None = None) -> None:
        """Destroy the newest context of a GPU, or of all; raises IndexError where there is none."""
        mine = [each for each in self._contexts if minor in {None, each.device.gpu.minor}]
        context = mine[-1]
        self._contexts.remove(context)
        for channel in context.channels:
            self._caller.unregister_channel(self._uvm, context.device.gpu.raw_uuid, self._client, channel)
        for each in context.objects:
            self._caller.free(self._control, self._client, context.device.handle, each)
        self._free_handles += context.handles
        for descriptor in context.files:
            os.close(descriptor)

    def shut_down(self) -> None:
        """Destroy everything and close every file."""
        while self._contexts:
            self.destroy()
        if self._client:
            self._caller.free(self._control, self._client, self._client, self._client)
        self.close()

    def close(self) -> None:
        """Close every file and destroy nothing."""
        for descriptor in self.files:
            os.close(descriptor)
        self.forget()

    def forget(self) -> None:
        """Have nothing any more: the files were closed in another way."""
        Cuda.__init__(self, self._caller)

    def move_control(self) -> int:
        """Replace nvidiactl by a copy of the descriptor, and close the first one; returns the copy."""
        first, self._control = self._control, os.dup(self._control)
        os.close(first)
        return self._control

    def count(self, contexts: int) -> None:
        """Allocate and free so many context shares one after the other, and nothing else."""
        device = next(iter(self._devices.values()))
        group, share = self._handle(), self._handle()
        self._caller.allocate(self._control, self._client, device.handle, group, abi.CHANNEL_GROUP)
        for _ in range(contexts):
            self._caller.allocate(self._control, self._client, group, share, abi.CONTEXT_SHARE)
            self._caller.free(self._control, self._client, group, share)
        self._caller.free(self._control, self._client, device.handle, group)
        self._free_handles += (group, share)

    # cuInit

    def _initialise(self) -> None:
        first = self._caller.open(CONTROL)
        self._caller.plain(first, abi.SYS_PARAMS, abi.SYS_PARAMS_STRUCT.size)
        self._caller.plain(first, abi.CARD_INFO, abi.CARD_STRUCT.size * abi.MAX_GPU_IDS)
        client = self._caller.allocate_client(first)
        self._caller.control(first, client, client, _BUILD_VERSION)
        self._caller.free(first, client, client, client)
        os.close(first)
        self._control = self._caller.open(CONTROL, close_on_exec=False)
        self._client = self._caller.allocate_client(self._control)
        for _ in range(2):
            self._caller.control(self._control, self._client, self._client, _SHARE_POLICY)
        self._caller.allocate(self._control, self._client, self._client, self._handle(), abi.OS_EVENT)
        self._uvm, second = self._caller.open(UVM), self._caller.open(UVM)
        self._files |= {self._uvm, second}
        self._caller.unified(self._uvm, abi.UVM_INITIALIZE)
        self._caller.unified(second, abi.UVM_MM_INITIALIZE, struct.pack("=i", self._uvm))
        self._caller.control(self._control, self._client, self._client, _ATTACH_IDS)
        self._controls(INIT_CONTROLS - 4)

    def _add_device(self, gpu: Gpu) -> _Device:
        nodes = [self._open_node(gpu) for _ in range(5)]
        self._files.update(nodes)
        made = _Device(gpu, self._handle(), self._handle(), nodes[0])
        self._caller.allocate_device(self._control, self._client, made.handle, gpu.instance)
        for rm_class in (abi.SUBDEVICE, *[abi.USERMODE] * 4):
            self._caller.allocate(self._control, self._client, made.handle, self._handle(), rm_class)
        self._caller.allocate(self._control, self._client, made.handle, made.space, abi.VA_SPACE)
        self._caller.unified(self._uvm, abi.UVM_REGISTER_GPU, gpu.raw_uuid)
        self._devices[gpu.minor] = made
        return made

    # cuCtxCreate

    def _register_space(self, device: _Device) -> None:
        if device.has_space:
            return
        head = abi.VASPACE_STRUCT.pack(device.gpu.raw_uuid, self._control, self._client, device.space, 0)
        self._caller.unified(self._uvm, abi.UVM_REGISTER_GPU_VASPACE, head[:-4])
        device.has_space = True

    def _open_files(self, context: _Context) -> None:
        context.files += [self._open_node(context.device.gpu) for _ in range(GPU_OPENS)]
        context.files += [self._caller.open(CONTROL) for _ in range(CONTROL_OPENS)]

    def _allocate_channels(self, context: _Context) -> None:
        device = context.device
        groups = [self._add(context, device.handle, abi.CHANNEL_GROUP) for _ in range(GROUPS)]
        context.objects += groups
        # The groups are freed, and what is below them with them.
        self._add(context, groups[0], abi.CONTEXT_SHARE)
        for number in range(CHANNELS):
            channel = self._add(context, groups[number % GROUPS], abi.GPFIFO_HOPPER)
            context.channels.append(channel)
            if number < ENGINES:
                engine = abi.COMPUTE_HOPPER if number % GROUPS == 0 else abi.COPY_HOPPER
                self._add(context, channel, engine)
            self._caller.control(self._control, self._client, channel, _WORK_TOKEN)
            head = device.gpu.raw_uuid + struct.pack("=iII", self._control, self._client, channel)
            self._caller.unified(self._uvm, abi.UVM_REGISTER_CHANNEL, head)
        for group in groups:
            self._caller.control(self._control, self._client, group, _SCHEDULE)

    def _allocate_others(self, context: _Context) -> None:
        parent = context.device.handle
        debugger = self._add(context, parent, abi.DEBUGGER)
        self._caller.control(self._control, self._client, debugger, _EXCEPTION_MASK)
        others = [self._add(context, parent, abi.MEMORY_SYSTEM) for _ in range(OTHER_OBJECTS)]
        events = [
            self._add(context, parent, abi.OS_EVENT, through=context.files[number])
            for number in range(EVENTS)
        ]
        context.objects += [debugger, *others, *events]

    # What all of it needs

    def _add(self, context: _Context, parent: int, rm_class: int, *, through: int | None = None) -> int:
        handle = self._handle()
        context.handles.append(handle)
        descriptor = self._control if through is None else through
        return self._caller.allocate(descriptor, self._client, parent, handle, rm_class)

    def _handle(self) -> int:
        if self._free_handles:
            return self._free_handles.pop()
        self._next_handle += 1
        return self._next_handle - 1

    def _open_node(self, gpu: Gpu) -> int:
        descriptor = self._caller.open(f"nvidia{gpu.minor}")
        self._caller.register(descriptor, self._control)
        return descriptor

    def _controls(self, number: int) -> None:
        for _ in range(number):
            self._caller.control(self._control, self._client, self._client, _ANY_CONTROL)
