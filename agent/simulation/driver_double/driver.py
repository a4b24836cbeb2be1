"""What the driver's device files answer: opens, ioctls, the end of an open file; and the books on them.

Guarantees:

1. A command is checked as the driver does it: by its number and exact size, and by the node it comes to.
2. A client lives as long as its open file, and that as long as a nvidiaN that was registered to it.
3. ``books`` returns what the driver knows, and nothing that comes from a probe.

Commands that change nothing here (most controls, memory, mappings) are accepted and answered with success.
Sources: open-gpu-kernel-modules, nv.c, escape.c.
"""

import errno
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from agent.simulation.driver_double import abi, nodes
from agent.simulation.driver_double.caller import descriptor_of, read_memory, thread_group, write_memory
from agent.simulation.driver_double.fuse import Ioctl, IoctlAnswer
from agent.simulation.driver_double.kept import Asking, KeptFile
from agent.simulation.driver_double.nodes import Gpu
from agent.simulation.driver_double.resources import Rejected, ResourceManager
from agent.simulation.driver_double.unified_memory import UnifiedMemory

MAX_FILES: Final = 65_536
"""Open files at a time; one more is rejected."""
MAX_PROCESSES: Final = 65_536
"""Processes with counts of their own; those of one more are counted in the total alone."""

_WITHOUT_EFFECT: Final = frozenset(
    {0x35, 0x41, 0x4A, 0x4E, 0x4F, 0x54, 0x57, 0x58, 0x5E, 206, 207, 212, 214, 218}
)
"""SHARE, IDLE_CHANNELS, VID_HEAP_CONTROL, MAP_MEMORY and the like: what they do is not simulated."""


@dataclass(slots=True)
class _File:
    name: str
    control: int | None = None
    """The nvidiactl that a nvidiaN was registered to."""
    users: int = 0
    """How many nvidiaN are registered to this nvidiactl."""
    kept: KeptFile | None = None


class Driver:
    """The files of a folder; ``answer_later`` gives the answer to a call that was left open."""

    def __init__(
        self,
        version: str,
        gpus: Sequence[Gpu],
        *,
        capabilities: Sequence[int] = (),
        answer_later: Callable[[int, IoctlAnswer], None],
    ) -> None:
        self.rm = ResourceManager()
        self._version = version
        self._layout = abi.layout(version)
        self._unified_memory = UnifiedMemory(gpus, self.rm, self._layout)
        self._gpus = tuple(gpus)
        self._answer_later = answer_later
        self._names = {inode: name for name, inode in nodes.inodes(gpus, capabilities).items()}
        self._files: dict[int, _File] = {}
        self._last_file = 0
        self.asking = Asking()
        self._opened: Counter[str] = Counter()
        self._released: Counter[str] = Counter()
        self._processes: dict[int, Counter[str]] = {}
        self._on_control: Mapping[int, Callable[[Ioctl], IoctlAnswer]] = {
            abi.FREE: self._free,
            abi.DUP_OBJECT: self._duplicate,
            abi.CONTROL: self._control,
            abi.CHECK_VERSION_STR: self._version_check,
            abi.CARD_INFO: self._cards,
        }

    # Opens and their end

    def opened(self, inode: int, thread: int) -> int:
        """Open a node."""
        if len(self._files) >= MAX_FILES:
            raise OSError(errno.ENFILE, "too many open files")
        name = self._names[inode]
        self._last_file += 1
        self._files[self._last_file] = _File(name)
        self._opened[name] += 1
        self._count(thread, "opens")
        return self._last_file

    def released(self, file: int) -> None:
        """End what belongs to an open file."""
        ended = self._files[file]
        self._released[ended.name] += 1
        self.rm.end_file(file)
        self._unified_memory.released(file)
        del self._files[file]
        if ended.control is not None:
            self._release_control(ended.control)

    def _release_control(self, control: int) -> None:
        kept = self._files[control]
        kept.users -= 1
        if kept.users == 0 and kept.kept is not None:
            kept.kept.close()
            kept.kept = None

    def sought(self, file: int, thread: int) -> None:
        """Take what may be the answer to a question of our own."""
        self.asking.answered(file, thread)

    # Commands

    def ioctl(self, call: Ioctl) -> IoctlAnswer | None:
        """Answer a command."""
        file = self._files[call.file]
        self._count(call.thread, "calls")
        if file.name.startswith(nodes.UVM):
            return self._unified_memory.ioctl(call)
        if abi.number_of(call.command) != abi.XFER_CMD:
            return self._command(call, abi.number_of(call.command))
        return self._wrapped(call)

    def _wrapped(self, call: Ioctl) -> IoctlAnswer | None:
        """Do the command that XFER_CMD carries by its address."""
        if len(call.data) != abi.XFER_STRUCT.size:
            raise OSError(errno.EINVAL, "not the size of XFER_CMD")
        number, size, address = abi.XFER_STRUCT.unpack(call.data)
        if size > abi.MAX_XFER_BYTES or number == abi.REGISTER_FD:
            raise OSError(errno.EINVAL, "over the largest command, or one that fits by itself")
        inner = call._replace(data=read_memory(call.thread, address, size))
        answer = self._command(inner, number)
        if answer is None:
            return None
        write_memory(call.thread, address, answer.data)
        return IoctlAnswer(call.data, answer.error)

    def _command(self, call: Ioctl, number: int) -> IoctlAnswer | None:
        is_control = self._files[call.file].name == nodes.CONTROL
        match number:
            case abi.ALLOC:
                return self._allocate(call, is_control=is_control)
            case abi.REGISTER_FD:
                return self._register(call)
            case abi.ALLOC_MEMORY | abi.NUMA_INFO if is_control:
                raise OSError(errno.EINVAL, "for the nodes of GPUs only")
            case abi.ALLOC_MEMORY:
                return self._allocate_memory(call)
            case abi.NUMA_INFO:
                return self._numa(call)
            case _ if not is_control:
                raise OSError(errno.EINVAL, "for nvidiactl only")
            case _ if number in _WITHOUT_EFFECT:
                return IoctlAnswer(call.data)
            case _ if number in self._on_control:
                return self._on_control[number](call)
            case _:
                raise OSError(errno.EINVAL, "no such command")

    def _owner(self, file: int) -> int:
        """Return the open file that a file's calls count as. Source: escape.c."""
        control = self._files[file].control
        return file if control is None else control

    def _allocate(self, call: Ioctl, *, is_control: bool) -> IoctlAnswer:
        try:
            status_at = self._layout.alloc_status(len(call.data))
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None
        client, parent, handle, rm_class, parameters = abi.ALLOC_HEAD.unpack_from(call.data)
        if not is_control and rm_class not in abi.OS_EVENTS:
            raise OSError(errno.EINVAL, "for nvidiactl only")
        status = abi.OK
        try:
            if rm_class in abi.ROOTS:
                rm_class = abi.ROOT_CLIENT
                handle = self.rm.allocate_client(self._owner(call.file), thread_group(call.thread))
            else:
                instance = self._instance(call, parameters) if rm_class == abi.DEVICE else None
                handle = self.rm.allocate(self._owner(call.file), client, parent, handle, rm_class, instance)
        except Rejected as rejection:
            status = rejection.status
        else:
            self._count(call.thread, "allocs")
            self._count(call.thread, "contexts_allocated", int(rm_class == abi.CONTEXT_SHARE))
        answer = bytearray(call.data)
        abi.ALLOC_HEAD.pack_into(answer, 0, client, parent, handle, rm_class, parameters)
        struct.pack_into("=I", answer, status_at, status)
        return IoctlAnswer(bytes(answer))

    def _instance(self, call: Ioctl, parameters: int) -> int:
        """Return the device instance that the parameters of a device name; without any it is the first."""
        if parameters == 0:
            return 0
        try:
            (instance,) = struct.unpack("=I", read_memory(call.thread, parameters, 4))
        except OSError:
            raise self.rm.reject(abi.INVALID_ADDRESS) from None
        if instance not in {gpu.instance for gpu in self._gpus}:
            raise self.rm.reject(abi.INVALID_DEVICE)
        return int(instance)

    def _free(self, call: Ioctl) -> IoctlAnswer:
        client, parent, handle, _ = _unpacked(abi.FREE_STRUCT, call)
        status = self._status(lambda: self.rm.free(self._owner(call.file), client, handle))
        self._count(call.thread, "frees", int(status == abi.OK))
        return IoctlAnswer(abi.FREE_STRUCT.pack(client, parent, handle, status))

    def _duplicate(self, call: Ioctl) -> IoctlAnswer:
        client, parent, handle, source_client, source, flags, _ = _unpacked(abi.DUP_STRUCT, call)
        status = abi.OK
        try:
            owner = self._owner(call.file)
            handle = self.rm.duplicate(owner, client, parent, handle, source_client, source)
        except Rejected as rejection:
            status = rejection.status
        return IoctlAnswer(abi.DUP_STRUCT.pack(client, parent, handle, source_client, source, flags, status))

    def _control(self, call: Ioctl) -> IoctlAnswer:
        client, handle, command, flags, parameters, size, _ = _unpacked(abi.CONTROL_STRUCT, call)

        def act() -> None:
            self.rm.check(self._owner(call.file), client)
            self._act(call, command, parameters, size)

        status = self._status(act)
        answer = abi.CONTROL_STRUCT.pack(client, handle, command, flags, parameters, size, status)
        return IoctlAnswer(answer)

    def _act(self, call: Ioctl, command: int, parameters: int, size: int) -> None:
        """Execute a control that has an answer; the others are accepted."""
        if command in {abi.GET_ID_INFO, abi.GET_ID_INFO_V2}:
            (gpu_id,) = struct.unpack("=I", read_memory(call.thread, parameters, 4))
            found = next((gpu for gpu in self._gpus if gpu.gpu_id == gpu_id), None)
            if found is None:
                raise self.rm.reject(abi.INVALID_ARGUMENT)
            answer = abi.ID_INFO_HEAD.pack(gpu_id, abi.GPU_IN_USE, found.instance, 0)
        elif command in {abi.GET_ATTACHED_IDS, abi.GET_PROBED_IDS}:
            ids = [gpu.gpu_id for gpu in self._gpus][: abi.MAX_GPU_IDS]
            ids += [abi.NO_GPU_ID] * (abi.MAX_GPU_IDS - len(ids))
            answer = struct.pack(f"={abi.MAX_GPU_IDS}I", *ids)
        else:
            return
        if size < len(answer):
            raise self.rm.reject(abi.INVALID_ARGUMENT)
        write_memory(call.thread, parameters, answer)

    def _status(self, act: Callable[[], None]) -> int:
        try:
            act()
        except Rejected as rejection:
            return rejection.status
        except OSError:
            return self.rm.reject(abi.INVALID_ADDRESS).status
        return abi.OK

    def _allocate_memory(self, call: Ioctl) -> IoctlAnswer:
        if len(call.data) != abi.ALLOC_MEMORY_BYTES:
            raise OSError(errno.EINVAL, "not the size of ALLOC_MEMORY")
        (client,) = struct.unpack_from("=I", call.data)
        answer = bytearray(call.data)
        status = self._status(lambda: self.rm.check(self._owner(call.file), client))
        struct.pack_into("=I", answer, abi.ALLOC_MEMORY_STATUS, status)
        return IoctlAnswer(bytes(answer))

    def _version_check(self, call: Ioctl) -> IoctlAnswer:
        kind, _, given = _unpacked(abi.VERSION_STRUCT, call)
        own = self._version.encode("ascii")
        expected = given.partition(b"\0")[0]
        if kind == abi.VERSION_RELAXED:
            agrees = expected.partition(b".")[0] == own.partition(b".")[0]
        else:
            agrees = kind == abi.VERSION_QUERY or expected == own
        version = given if agrees and kind != abi.VERSION_QUERY else own
        answer = abi.VERSION_STRUCT.pack(kind, abi.VERSION_RECOGNIZED, version)
        return IoctlAnswer(answer, 0 if agrees else errno.EINVAL)

    def _cards(self, call: Ioctl) -> IoctlAnswer:
        rows = len(call.data) // abi.CARD_STRUCT.size
        if rows < len(self._gpus):
            raise OSError(errno.EINVAL, "no room for every GPU")
        return IoctlAnswer(b"".join(gpu.card() for gpu in self._gpus).ljust(len(call.data), b"\0"))

    def _numa(self, call: Ioctl) -> IoctlAnswer:
        if len(call.data) != self._layout.numa_info_size:
            raise OSError(errno.EINVAL, "not the size of NUMA_INFO")
        return IoctlAnswer(abi.NUMA_HEAD.pack(abi.NO_NUMA_NODE, 0, 0, 0, 0).ljust(len(call.data), b"\0"))

    # Registering a node with nvidiactl

    def _register(self, call: Ioctl) -> IoctlAnswer | None:
        """Keep the caller's nvidiactl until this file ends; the driver first determines which one it is."""
        if len(call.data) != 4 or self._files[call.file].control is not None:
            raise OSError(errno.EINVAL, "not the size of REGISTER_FD, or registered already")
        (number,) = struct.unpack("=i", call.data)
        try:
            descriptor = descriptor_of(thread_group(call.thread), number)
        except OSError as error:
            raise OSError(errno.EINVAL, "not an open file of the caller") from error
        self.asking.ask(descriptor, lambda control: self._registered(call, descriptor, control))
        return None

    def _registered(self, call: Ioctl, descriptor: int, control: int | None) -> None:
        kept = self._registrable(call.file, control)
        if kept is None:
            os.close(descriptor)
            self._answer_later(call.number, IoctlAnswer(call.data, errno.EINVAL))
            return
        self._files[call.file].control = control
        kept.users += 1
        if kept.kept is None:
            kept.kept = KeptFile(descriptor)
        else:
            os.close(descriptor)
        self._answer_later(call.number, IoctlAnswer(call.data))

    def _registrable(self, file: int, control: int | None) -> _File | None:
        """Return the open file that this one may be registered to. Source: escape.c, REGISTER_FD."""
        found = None if control is None or control == file else self._files[control]
        node = self._files.get(file)
        if found is None or found.name != nodes.CONTROL or found.control is not None:
            return None
        return None if node is None or node.control is not None or node.users > 0 else found

    # The books

    def _count(self, thread: int, what: str, by: int = 1) -> None:
        if by == 0:
            return
        pid = thread_group(thread) if thread not in self._processes else thread
        if pid in self._processes or len(self._processes) < MAX_PROCESSES:
            self._processes.setdefault(pid, Counter())[what] += by

    def books(self) -> dict[str, Any]:
        """Return what the driver granted and what of it lives, as it goes over the control socket."""
        minors = {gpu.instance: gpu.minor for gpu in self._gpus}
        return {
            "contexts": [
                {"client": each.client, "handle": each.handle, "pid": each.pid}
                | {"minor": None if each.instance is None else minors[each.instance]}
                for each in self.rm.contexts()
            ],
            "clients": [each._asdict() for each in self.rm.clients()],
            "counts": asdict(self.rm.counts),
            "opened": dict(self._opened),
            "released": dict(self._released),
            "processes": {str(pid): dict(counts) for pid, counts in self._processes.items()},
            "spaces": [
                {"uuid": uuid.hex(), "client": client, "space": space}
                for uuid, client, space in self._unified_memory.spaces()
            ],
        }


def _unpacked(form: struct.Struct, call: Ioctl) -> tuple[Any, ...]:
    if len(call.data) != form.size:
        raise OSError(errno.EINVAL, "not the size of the command's struct")
    return form.unpack(call.data)
