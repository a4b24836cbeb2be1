"""Control of a simulated node's NVML: what the hardware is, does, answers and breaks.

*Guarantees*
- The state is a file: it outlives agents and controllers, and several of each may use it at once.
- A method's change appears to NVML clients at once and whole; a blocked event wait or hung call sees it
  within a millisecond.
- A GPU is named by its position in the specification, whatever index NVML gives it at the moment.
- Methods may be called from any thread; none of them waits for a client, except `wait_until`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from agent.simulation.nvml.control import (
    FORCED_HANG,
    NODE,
    NOT_FORCED,
    UNREADABLE_GPU,
    NodeControl,
    NvmlStateError,
)
from agent.simulation.nvml.fields import (
    GPU_IS_LOST,
    PLACEMENT_FIELDS,
    Numbers,
    gpu_numbers,
    gpu_texts,
    initial_mig,
    mig_numbers,
    profile_from_fields,
)
from agent.simulation.presets import (
    GpuSpec,
    MigDeviceSpec,
    MigProfileSpec,
    NodeSpec,
    PlacedMigDevice,
    place_mig_devices,
)

DRIVER_NOT_LOADED = 9
XID_EVENT = 0x8
NO_INSTANCE = 0xFFFFFFFF

_ECC_TYPES = {"corrected": 0, "uncorrected": 1}
_ECC_COUNTERS = {"volatile": 0, "aggregate": 1}
_ECC_LOCATIONS = {
    "l1_cache": 0,
    "l2_cache": 1,
    "dram": 2,
    "register_file": 3,
    "texture": 4,
    "shared": 5,
    "cbu": 6,
    "sram": 7,
}
_UUID_DAMAGE = {"empty": 1, "unterminated": 2}
_PROCESS_KINDS = {"compute": 1, "graphics": 2, "mps": 4}

EccType = Literal["corrected", "uncorrected"]
EccCounter = Literal["volatile", "aggregate"]
EccLocation = Literal["l1_cache", "l2_cache", "dram", "register_file", "texture", "shared", "cbu", "sram"]
ProcessKind = Literal["compute", "graphics", "mps"]
FabricState = Literal["not_supported", "not_started", "in_progress", "completed"]
_FABRIC_STATES: dict[FabricState, int] = {
    "not_supported": 0,
    "not_started": 1,
    "in_progress": 2,
    "completed": 3,
}


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process NVML lists on a GPU; gi and ci are None unless it runs on a MIG device."""

    pid: int
    memory_bytes: int
    kind: ProcessKind = "compute"
    gi: int | None = None
    ci: int | None = None


@dataclass(frozen=True, slots=True)
class EventTimes:
    """When an event was pushed and first handed over (CLOCK_MONOTONIC), and how many clients got it."""

    pushed_ns: int
    returned_ns: int | None
    deliveries: int


class NvmlState:
    """A handle on the state file of a simulated node. Close it, or use it in a `with`."""

    def __init__(self, node: NodeControl) -> None:
        self._node = node

    @classmethod
    def create(cls, path: Path, spec: NodeSpec) -> Self:
        """Write a node's state and put it in place at once, replacing an earlier one."""
        state = cls(NodeControl.create(path))
        try:
            state._fill(spec)
            state._node.publish()
        except BaseException:
            state.close()
            raise
        return state

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing state. Raises NvmlStateError where there is none or another version made it."""
        return cls(NodeControl.open(path))

    @property
    def path(self) -> Path:
        """The state file."""
        return self._node.path

    def close(self) -> None:
        """Close the file; the node stays as it is."""
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the driver

    def unload_driver(self, code: int = DRIVER_NOT_LOADED) -> None:
        """Make nvmlInit and, for clients that have initialised, every call answer `code`."""
        self._set(NODE, {"driver_code": code})

    def load_driver(self) -> None:
        """Let the driver answer again."""
        self._set(NODE, {"driver_code": 0})

    # --- which GPUs there are

    @property
    def gpus(self) -> int:
        """How many positions there are, hidden GPUs included."""
        return self.number(None, "gpus")

    def uuid(self, gpu: int) -> str:
        """Name the GPU of a position."""
        return self.text(gpu, "uuid")

    def set_uuid(self, gpu: int, uuid: str) -> None:
        """Let a GPU answer another UUID, which another GPU may have too."""
        with self._node.change(self._position(gpu)):
            self._node.write_texts({"uuid": uuid})

    def damage_uuid(self, gpu: int, damage: Literal["empty", "unterminated"] | None) -> None:
        """Let the call for a GPU's UUID succeed without one; None: it answers as usual."""
        self._set(gpu, {"uuid_damage": 0 if damage is None else _UUID_DAMAGE[damage]})

    def hide_gpu(self, gpu: int, *, code: int = GPU_IS_LOST) -> None:
        """Take a GPU away: the count shrinks, later ones move up, its old handles answer `code`."""
        self._set(gpu, {"visible": 0, "gone_code": code})

    def reveal_gpu(self, gpu: int) -> None:
        """Bring a GPU back; its handles answer again."""
        self._set(gpu, {"visible": 1})

    # --- events

    def push_xid(self, gpu: int | None, xid: int, *, gi: int | None = None, ci: int | None = None) -> int:
        """Report an XID; a GPU of None is one whose UUID is unreadable. Returns the event's number."""
        return self.push_event(gpu, XID_EVENT, data=xid, gi=gi, ci=ci)

    def push_event(
        self, gpu: int | None, kind: int, *, data: int = 0, gi: int | None = None, ci: int | None = None
    ) -> int:
        """Report an NVML event (`kind` is an nvmlEventType bit) to every client that listens to it."""
        position = UNREADABLE_GPU if gpu is None else self._position(gpu)
        return self._node.push_event(position, kind, data, _instance(gi), _instance(ci))

    def enable_system_events(self) -> None:
        """Make NVML support its events of GPUs bound and unbound, as newer drivers do."""
        self._set(NODE, {"system_events": 1})

    def push_rebind(self, gpu: int, *, bound: bool) -> None:
        """Report that a GPU was bound to its driver, or unbound, to every client that asked for it."""
        self._node.push_rebind(self._position(gpu), bound=bound)

    def event_times(self, sequence: int) -> EventTimes:
        """Return the times of one of the last 1,024 events. Raises NvmlStateError for an older one."""
        pushed_ns, returned_ns, deliveries = self._node.event_times(sequence)
        return EventTimes(pushed_ns=pushed_ns, returned_ns=returned_ns or None, deliveries=deliveries)

    # --- what calls answer instead

    def set_return(self, function: str | None, code: int, *, gpu: int | None = None) -> None:
        """Make a function answer `code`; None is every function, a GPU of None every GPU and none.

        A name without `_v2` and the like means all its versions. The most particular rule counts: function
        and GPU, function, GPU, everything. Code 0 answers as usual: an exception from a wider rule.
        """
        self._node.force(function, self._scope(gpu), code + 1)

    def clear_return(self, function: str | None, *, gpu: int | None = None) -> None:
        """Take back the rule set for exactly this function and GPU."""
        self._node.force(function, self._scope(gpu), NOT_FORCED)

    def hang(self, *, gpu: int | None = None, function: str | None = None) -> None:
        """Let calls block until released: of a function, of a GPU, of both, or (neither) of the driver."""
        if function is not None:
            self._node.force(function, self._scope(gpu), FORCED_HANG)
        else:
            self._set(self._scope(gpu), {"hang": 1})

    def release(self, *, gpu: int | None = None, function: str | None = None) -> None:
        """End exactly the hang that `hang` with the same arguments began."""
        if function is not None:
            self._node.force(function, self._scope(gpu), NOT_FORCED)
        else:
            self._set(self._scope(gpu), {"hang": 0})

    def clear_faults(self) -> None:
        """End every hang, forced answer and missing driver, and bring hidden GPUs back."""
        with self._node.lock:
            self._node.unforce_all()
            self._set(NODE, {"hang": 0, "driver_code": 0})
            for gpu in range(self.gpus):
                self._set(gpu, {"hang": 0, "visible": 1})

    # --- the state of a GPU

    def set_mig(self, gpu: int, devices: Sequence[MigDeviceSpec], *, enabled: bool = True) -> tuple[str, ...]:
        """Reconfigure MIG; handles from before become invalid. Returns the UUIDs. Raises PresetError."""
        with self._node.lock:
            placed = place_mig_devices(self._position(gpu), self._profiles(gpu), devices)
            with self._node.change(gpu):
                self._write_mig(gpu, placed, enabled=enabled)
        return tuple(device.uuid for device in placed)

    def set_ecc(
        self,
        gpu: int,
        count: int,
        *,
        kind: EccType = "uncorrected",
        counter: EccCounter = "volatile",
        location: EccLocation = "dram",
    ) -> None:
        """Set one ECC error counter."""
        row = _ECC_TYPES[kind] * len(_ECC_COUNTERS) + _ECC_COUNTERS[counter]
        with self._node.change(self._position(gpu)):
            self._node.write_number("ecc", row * len(_ECC_LOCATIONS) + _ECC_LOCATIONS[location], count)

    def set_remapped_rows(
        self,
        gpu: int,
        *,
        correctable: int = 0,
        uncorrectable: int = 0,
        pending: bool = False,
        failed: bool = False,
    ) -> None:
        """Set what row remapping reports."""
        self._set(gpu, {"remapped_rows": [correctable, uncorrectable, int(pending), int(failed)]})

    def set_pages_pending(self, gpu: int, *, pending: bool | None) -> None:
        """Set whether a page retirement waits for a reset; None: not supported, as with row remapping."""
        self._set(gpu, {"pages_pending": None if pending is None else int(pending)})

    def set_recovery_action(self, gpu: int, action: int | None) -> None:
        """Set field 230: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset; None: not supported."""
        self._set(gpu, {"recovery_action": action})

    def set_temperature(self, gpu: int, celsius: int) -> None:
        """Set the GPU's temperature in degrees Celsius."""
        self._set(gpu, {"temperature": celsius})

    def set_clock_reasons(self, gpu: int, reasons: int) -> None:
        """Set why clocks are held down: a bit mask of nvmlClocksEventReason*."""
        self._set(gpu, {"clock_reasons": reasons})

    def set_memory_used(self, gpu: int, used_bytes: int) -> None:
        """Set the memory in use, whatever the listed processes hold."""
        self._set(gpu, {"memory_used": used_bytes})

    def set_processes(self, gpu: int, processes: Sequence[GpuProcess]) -> None:
        """Set the processes on a GPU and the memory they use together, on its MIG devices, too."""
        with self._node.lock:
            most = self._node.bound("process_pid")
            if len(processes) > most:
                raise NvmlStateError(f"{len(processes)} processes are too many, {most} fit")
            rows = range(self.number(gpu, "mig_count"))
            places = [(self.number(gpu, "mig_gi", row), self.number(gpu, "mig_ci", row)) for row in rows]
            held = [sum(each.memory_bytes for each in processes if (each.gi, each.ci) == at) for at in places]
            self._set(gpu, {**_process_numbers(processes), "mig_memory_used": held})

    def set_fabric(
        self,
        gpu: int,
        state: FabricState,
        *,
        status: int = 0,
        health_mask: int | None = None,
        health_summary: int | None = None,
    ) -> None:
        """Set how far the GPU's registration with the fabric is, with NVML's status code and health."""
        numbers: dict[str, int] = {"fabric_state": _FABRIC_STATES[state], "fabric_status": status}
        if health_mask is not None:
            numbers["fabric_health_mask"] = health_mask
        if health_summary is not None:
            numbers["fabric_health_summary"] = health_summary
        self._set(gpu, numbers)

    def set_nvlink(self, gpu: int, link: int, *, up: bool) -> None:
        """Take one NVLink down or up."""
        with self._node.lock:
            if not 0 <= link < self.number(gpu, "links"):
                raise NvmlStateError(f"GPU {gpu} has no NVLink {link}")
            with self._node.change(gpu):
                self._node.write_number("link_state", link, int(up))

    def set_pcie(self, gpu: int, *, generation: int, width: int) -> None:
        """Set what the PCIe link has trained to."""
        self._set(gpu, {"pcie_generation": generation, "pcie_width": width})

    def set_pcie_replays(self, gpu: int, count: int) -> None:
        """Set the PCIe replay counter."""
        self._set(gpu, {"pcie_replays": count})

    # --- watching the clients

    def calls(self, function: str, *, gpu: int | None = None) -> int:
        """Count the calls of a function so far, all versions where none is named, of one GPU or in all."""
        return self._node.calls(function, self._scope(gpu))

    @property
    def inits(self) -> int:
        """Successful nvmlInit calls of all clients."""
        return self._node.counter("inits")

    @property
    def shutdowns(self) -> int:
        """Successful nvmlShutdown calls of all clients."""
        return self._node.counter("shutdowns")

    @property
    def hangs_entered(self) -> int:
        """Calls that began to hang."""
        return self._node.counter("hangs_entered")

    @property
    def events_lost(self) -> int:
        """Events some client lost because it was over a thousand behind, summed over clients."""
        return self._node.counter("events_lost")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Block until a condition about the clients holds; false when it did not in time.

        It is evaluated again whenever a client initialises, shuts down, begins to hang or is handed an event.
        """
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            seen = self._node.activity()
            if condition():
                return True
            if not self._node.wait_activity(seen, deadline_ns):
                return condition()

    # --- fields by name

    def number(self, gpu: int | None, field: str, index: int = 0) -> int:
        """Read a number field of node.h, of a GPU or (None) of the node."""
        return self._node.number(NODE if gpu is None else gpu, field, index)

    def set_number(self, gpu: int | None, field: str, value: int | None, index: int = 0) -> None:
        """Set a number field of node.h that has no method of its own; None means NOT_SUPPORTED."""
        with self._node.change(self._scope(gpu)):
            self._node.write_number(field, index, value)

    def text(self, gpu: int | None, field: str, index: int = 0) -> str:
        """Read a text field of node.h, of a GPU or (None) of the node."""
        return self._node.text(NODE if gpu is None else gpu, field, index)

    # --- inside

    def _position(self, gpu: int) -> int:
        if not 0 <= gpu < self.gpus:
            raise NvmlStateError(f"there is no GPU {gpu}, the node has {self.gpus}")
        return gpu

    def _scope(self, gpu: int | None) -> int:
        return NODE if gpu is None else self._position(gpu)

    def _fill(self, spec: NodeSpec) -> None:
        for position, gpu in enumerate(spec.gpus):
            self._write_gpu(position, gpu)
        with self._node.change(NODE):
            versions = {"driver_version": spec.driver_version, "nvml_version": spec.nvml_version}
            self._node.write_texts(versions)
            self._node.write_numbers({"cuda_version": spec.cuda_version, "gpus": len(spec.gpus)})

    def _write_gpu(self, position: int, gpu: GpuSpec) -> None:
        with self._node.change(position):
            self._node.write_texts(gpu_texts(gpu))
            self._node.write_numbers(gpu_numbers(gpu))
            if gpu.mig is not None:
                self._write_mig(position, initial_mig(position, gpu), enabled=gpu.mig.enabled)

    def _write_mig(self, gpu: int, placed: Sequence[PlacedMigDevice], *, enabled: bool) -> None:
        generation = self.number(gpu, "mig_generation") + 1
        self._node.write_texts({"mig_uuid": [device.uuid for device in placed]})
        self._node.write_numbers(mig_numbers(placed, enabled=enabled, generation=generation))

    def _profiles(self, gpu: int) -> list[MigProfileSpec]:
        return [
            profile_from_fields(
                self.text(gpu, "profile_name", row),
                {field: self.number(gpu, field, row) for field in PLACEMENT_FIELDS},
            )
            for row in range(self.number(gpu, "profiles"))
        ]

    def _set(self, scope: int, numbers: Numbers) -> None:
        with self._node.change(scope if scope == NODE else self._position(scope)):
            self._node.write_numbers(numbers)


def _instance(number: int | None) -> int:
    return NO_INSTANCE if number is None else number


def _process_numbers(processes: Sequence[GpuProcess]) -> Mapping[str, int | Sequence[int]]:
    return {
        "memory_used": sum(process.memory_bytes for process in processes),
        "processes": len(processes),
        "process_pid": [process.pid for process in processes],
        "process_memory": [process.memory_bytes for process in processes],
        "process_gi": [_instance(process.gi) for process in processes],
        "process_ci": [_instance(process.ci) for process in processes],
        "process_kind": [_PROCESS_KINDS[process.kind] for process in processes],
    }
