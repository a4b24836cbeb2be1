"""A kernel and a driver in miniature: the truth for the tracker, and all of its input.

Its state is the truth; the ring, the map's rows and the scans are what a probe would read of it.
"""

from collections import Counter
from dataclasses import dataclass, field

from agent.core.usage.gpu_map import CONTROL, NVIDIA_MAJOR, GpuMap, folded
from agent.core.usage.rows import Removed
from agent.core.usage.tracker import UVM_REGISTER_GPU_VASPACE
from agent.model.ids import GpuUuid
from agent.model.rm import LAST, REGISTRATION, HeldFile, RmEvent, RmEventKind, RmObject
from agent.model.usage import NoPod, ProcessKey, ProcessStatus

ROOT, DEVICE, SUBDEVICE, VASPACE, SHARE, GROUP, CHANNEL = 0x41, 0x80, 0x2080, 0x90F1, 0x9067, 0xA06C, 0xC86F
NONE = 0xFFFFFFFF
UVM = 510 << 20

V0 = GpuUuid("GPU-01234567-89ab-4000-8000-000000000000")
V1 = GpuUuid("GPU-89abcdef-0123-4000-8000-000000000001")
"""Unlike those of the acceptance cases these differ in the half that the driver's structures are read for."""

GPUS = GpuMap(by_minor={0: V0, 1: V1}, by_instance={0: V0, 1: V1})


def _registered(file: int) -> tuple[int, int]:
    """Return the key of the row with a file's registration."""
    return file & 0xFFFFFFFF, file >> 32


def gpu_file(minor: int) -> int:
    """The device number of /dev/nvidiaN."""
    return NVIDIA_MAJOR << 20 | minor


@dataclass(eq=False)
class Task:
    """A process."""

    key: ProcessKey
    fds: list[int] = field(default_factory=list)
    """Files by descriptor; a file may be there twice."""
    opened: set[int] = field(default_factory=set)
    """Devices that it opened itself."""
    alive: bool = True
    exiting: bool = False
    state: str = "S"
    killed: bool = False
    comm: str = "python3"

    @property
    def status(self) -> ProcessStatus:
        """The status in /proc."""
        return ProcessStatus(self.key, self.comm, self.state, "/", NoPod.HOST, self.killed)


@dataclass(eq=False)
class Object:
    """An RM object."""

    rm_class: int
    parent: int
    instance: int


@dataclass(eq=False)
class RmClient:
    """An RM client."""

    file: int
    owner: Task
    objects: dict[int, Object] = field(default_factory=dict)


class World:
    """The machine."""

    def __init__(
        self,
        *,
        tier_driver: bool = False,
        reports_starts: bool = True,
        reports_opens: bool = True,
        start_ns: int = 90 * 10**9,
    ) -> None:
        self.now_ns = start_ns
        self.tier_driver = tier_driver
        self.reports_starts = reports_starts
        self.reports_opens = reports_opens
        self.opened: dict[int, int] = {}
        self.tasks: list[Task] = []
        self.files: dict[int, int] = {}
        """Device by address; addresses are reused."""
        self.keeps: dict[int, int] = {}
        """The nvidiactl that each file of a GPU was registered to."""
        self.messages: list[int] = []
        """Files in messages that no process has received yet."""
        self.clients: dict[int, RmClient] = {}
        self.rows: dict[tuple[int, int], RmObject] = {}
        self.ring: list[RmEvent] = []
        self.probed = True
        self._clients_made = 0xC1D00000
        self.last_handle = 0
        self.handles = 40
        """How many a client may use; few, so that they are reused."""
        self._ticks = 1000

    # Actions

    def spawn(self, pid: int, comm: str = "python3") -> Task:
        """A process begins; its pid must be free."""
        assert all(task.key.pid != pid for task in self.alive)
        self._ticks += 1
        task = Task(ProcessKey(pid, self._ticks), comm=comm)
        self.tasks.append(task)
        return task

    def fork(self, task: Task, pid: int) -> Task:
        """A child begins with the descriptors of its parent."""
        child = self.spawn(pid, task.comm)
        child.fds = list(task.fds)
        self.emit(task, RmEventKind.FORK, detail=pid)
        return child

    def open(self, task: Task, device: int) -> int:
        """A process opens a device; returns the file."""
        file = next(at for at in range(0x1000, 0x100000, 16) if at not in self.files)
        self.files[file] = device
        self.rows.pop(_registered(file), None)
        task.fds.append(file)
        task.opened.add(device)
        if self.probed and self.reports_opens:
            self.opened[file] = self.now_ns
        self.emit(task, RmEventKind.OPEN, file=file, device=device)
        return file

    def dup(self, task: Task, file: int) -> None:
        """Another descriptor of the same file; no event is seen."""
        task.fds.append(file)

    def send(self, to: Task, file: int) -> None:
        """A descriptor goes through a socket; its receiver calls the driver with it some time, or never."""
        to.fds.append(file)

    def post(self, task: Task, file: int) -> None:
        """A process puts a file into a message and closes it; no process reads the message yet."""
        self.messages.append(file)
        self.close(task, file)

    def receive(self, to: Task) -> int:
        """A process reads the oldest message; returns the file."""
        file = self.messages.pop(0)
        to.fds.append(file)
        return file

    def discard(self, task: Task) -> None:
        """A process closes the socket that has the oldest message in it."""
        self._release(self.messages.pop(0), task)

    def close(self, task: Task, file: int) -> None:
        """One descriptor is closed."""
        task.fds.remove(file)
        is_last = not self.tier_driver and not self._is_referred_to(file)
        if is_last:
            self.rows.pop(_registered(file), None)
            self.opened.pop(file, None)
        self.emit(task, RmEventKind.CLOSE, file=file, device=self.files[file], detail=LAST if is_last else 0)
        self._release(file, task)

    def exec(self, task: Task, comm: str) -> None:
        """Another program begins: what is not the control device is closed."""
        task.comm = comm
        for file in [file for file in task.fds if self.files[file] != CONTROL]:
            task.fds.remove(file)
            self._release(file, task)
        self.emit(task, RmEventKind.RESCAN)

    def begin_exit(self, task: Task) -> None:
        """The last thread begins to exit."""
        task.exiting = True
        self.emit(task, RmEventKind.EXIT)

    def exit(self, task: Task) -> None:
        """A process is gone."""
        if not task.exiting:
            self.begin_exit(task)
        task.alive = False
        held, task.fds = task.fds, []
        for file in dict.fromkeys(held):
            self._release(file, task)

    def register_fd(self, task: Task, file: int, control: int) -> None:
        """A file of a GPU is registered to a control file, which the driver keeps open for as long."""
        self.keeps[file] = control
        self.now_ns += 1
        ticks = task.key.start_ticks if self.reports_starts else 0
        row = RmObject(
            *_registered(file), self.now_ns, 7, file, task.key.pid, REGISTRATION, control, 0, ticks
        )
        if self.probed:
            self.rows[_registered(file)] = row
        self.emit(task, RmEventKind.REGISTER_FD, file=file, device=self.files[file], parent=control)

    def client(self, task: Task, file: int) -> int:
        """A client is made with a control file."""
        self._clients_made += 1
        handle = self._clients_made
        self.clients[handle] = RmClient(file, task)
        self._add(task, handle, handle, ROOT, 0)
        return handle

    def alloc(self, task: Task, client: int, parent: int, rm_class: int, instance: int = NONE) -> int:
        """An object is made under another."""
        self.last_handle = self.last_handle % self.handles + 1
        while self.last_handle in self.clients[client].objects:
            self.last_handle = self.last_handle % self.handles + 1
        handle = self.last_handle
        self.clients[client].objects[handle] = Object(rm_class, parent, instance)
        self._add(task, client, handle, rm_class, parent, instance)
        return handle

    def free(self, task: Task, client: int, handle: int) -> None:
        """An object and all below it, or a client, is freed."""
        self.rows.pop((client, handle), None)
        self.emit(
            task,
            RmEventKind.FREE,
            file=self.clients[client].file,
            client=client,
            handle=handle,
            device=CONTROL,
        )
        if handle == client:
            del self.clients[client]
            return
        objects = self.clients[client].objects
        doomed = [handle]
        for each in doomed:
            doomed += [name for name, known in objects.items() if known.parent == each]
        for each in doomed:
            del objects[each]

    def register(self, task: Task, file: int, client: int, vaspace: int, gpu: GpuUuid) -> None:
        """An address space is registered with unified memory."""
        first, second = folded(gpu)
        self.emit(
            task,
            RmEventKind.UVM,
            file=file,
            device=UVM,
            rm_class=UVM_REGISTER_GPU_VASPACE,
            client=client,
            parent=first,
            handle=vaspace,
            detail=second,
        )

    def context(self, task: Task, file: int, instance: int = 0, client: int | None = None) -> tuple[int, int]:
        """A context is made, with a client of its own unless one is given; returns client and handle."""
        owner = self.client(task, file) if client is None else client
        device = self.alloc(task, owner, owner, DEVICE, instance)
        self.alloc(task, owner, device, VASPACE)
        group = self.alloc(task, owner, device, GROUP)
        share = self.alloc(task, owner, group, SHARE)
        self.alloc(task, owner, group, CHANNEL)
        return owner, share

    # Views

    @property
    def alive(self) -> list[Task]:
        """The processes that live."""
        return [task for task in self.tasks if task.alive]

    def drain(self) -> list[RmEvent]:
        """The events since the last time."""
        events, self.ring = self.ring, []
        return events

    def scan(self) -> list[HeldFile]:
        """Every descriptor."""
        return [
            HeldFile(task.key.pid, task.key.start_ticks, file, self.files[file], fds, 7)
            for task in self.alive
            for file, fds in Counter(task.fds).items()
        ]

    def delete_rows(self, removed: list[Removed]) -> None:
        """Delete stale rows, as the source does with those that the tracker returns."""
        for each in removed:
            row = self.rows.get((each.client, each.handle))
            if row is not None and row.at_ns <= each.at_ns:
                del self.rows[each.client, each.handle]

    # The truth

    def instance_of(self, client: int, handle: int) -> int:
        """The device instance above an object."""
        objects = self.clients[client].objects
        while handle in objects and objects[handle].rm_class != DEVICE:
            handle = objects[handle].parent
        return objects[handle].instance if handle in objects else NONE

    def contexts(self, *, with_unheld: bool = True) -> Counter[tuple[ProcessKey, GpuUuid | None]]:
        """Live contexts by owner and GPU."""
        return Counter(
            (client.owner.key, GPUS.by_instance.get(self.instance_of(name, handle)))
            for name, client in self.clients.items()
            for handle, known in client.objects.items()
            if known.rm_class == SHARE and (with_unheld or self.keepers(client.file))
        )

    def gpus_of(self, task: Task) -> list[int]:
        """The minors that a process has opened itself."""
        return [minor for minor in GPUS.by_minor if gpu_file(minor) in task.opened]

    def holders(self, file: int) -> set[ProcessKey]:
        """The holders of a file."""
        return {task.key for task in self.alive if file in task.fds}

    def keepers(self, file: int) -> set[ProcessKey]:
        """The holders of a file, or of one that refers to it."""
        nodes = [node for node, control in self.keeps.items() if control == file]
        return self.holders(file).union(*map(self.holders, nodes))

    # Internals

    def _release(self, file: int, task: Task) -> None:
        if self._is_referred_to(file):
            return
        if self.tier_driver:
            self.emit(task, RmEventKind.RELEASE, file=file, device=self.files[file])
        del self.files[file]
        for handle in [handle for handle, client in self.clients.items() if client.file == file]:
            del self.clients[handle]
        if self.tier_driver:
            self.rows.pop(_registered(file), None)
        kept = self.keeps.pop(file, None)
        if kept is not None:
            self._release(kept, task)

    def _is_referred_to(self, file: int) -> bool:
        is_held = any(file in task.fds for task in self.alive)
        return is_held or file in self.messages or file in self.keeps.values()

    def _add(
        self, task: Task, client: int, handle: int, rm_class: int, parent: int, instance: int = NONE
    ) -> None:
        self.now_ns += 1
        file = self.clients[client].file
        ticks = task.key.start_ticks if self.reports_starts else 0
        row = RmObject(client, handle, self.now_ns, 7, file, task.key.pid, rm_class, parent, instance, ticks)
        if self.probed:
            self.rows[client, handle] = row
        self.emit(
            task,
            RmEventKind.ALLOC,
            file=file,
            device=CONTROL,
            rm_class=rm_class,
            client=client,
            parent=parent,
            handle=handle,
            detail=instance,
        )

    def emit(
        self,
        task: Task,
        kind: RmEventKind,
        *,
        file: int = 0,
        device: int = 0,
        rm_class: int = 0,
        client: int = 0,
        parent: int = 0,
        handle: int = 0,
        detail: int = 0,
    ) -> None:
        self.now_ns += 1
        if self.probed:
            pid = task.key.pid
            self.ring.append(
                RmEvent(
                    self.now_ns, 7, file, pid, pid, device, 3, kind, rm_class, client, parent, handle, detail
                )
            )
