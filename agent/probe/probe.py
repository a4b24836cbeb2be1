"""The loaded probe: descriptors of maps, programs and attachments, and the reads through them.

Invariants: nothing here compiles or loads. Closing every descriptor removes the probe from the kernel.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Final, NamedTuple

from agent.errors import ProbeLoadError
from agent.model.rm import HeldFile, ProcessCounters, RmObject
from agent.probe import kernel, procfs, syscalls
from agent.probe.attach import attach, remove_events
from agent.probe.kernel import NVIDIA_MAJOR, Majors
from agent.probe.layout import (
    CGROUP,
    CGROUP_KEY,
    CHECK,
    CONFIG,
    DEVICE,
    FORGOTTEN,
    FORGOTTEN_KEY,
    INDEX,
    NS_PER_TICK,
    OBJECT,
    OBJECT_KEY,
    OF_CGROUP,
    OPENING,
    OPENING_KEY,
    PROCESS,
    PROCESS_KEY,
    PROCESS_LIFE,
    SIZES,
    STATISTICS,
    TRACED,
    TRACED_KEY,
    Check,
    ProbeConfig,
    ProbeStatistics,
    TracedCall,
    decode_ended,
    decode_held,
    decode_objects,
    decode_processes,
    decode_statistics,
    decode_traced,
    encode_process,
)
from agent.probe.pins import About, Pins, PinsUnusableError
from agent.probe.procfs import Scan
from agent.probe.programs import BY_NAME
from agent.probe.request import Reply, Request
from agent.probe.ring import EVENTS, TRACED_CALLS, Ring

MAX_SCAN_BYTES: Final = 16 << 20
"""Bytes read of one run of the iterator: 350,000 descriptors."""
DRIVER_MODULES: Final = ("nvidia", "nvidia_uvm")
REATTACH_TRIES: Final = 3
"""A module's functions can be traced only a moment after it appears."""

_ITERATOR: Final = "bpf_iter__task_file"
_CHUNK_BYTES: Final = 65_536
_COPIED: Final = ("openings", "cgroups", "forgotten", "processes", "objects")
_FIRST: Final = INDEX.pack(0)


class Readiness(NamedTuple):
    """The last readiness check of a device, as measured in the kernel."""

    ready: bool
    check: Check


class Probe:
    """A probe in the kernel; ``agent.probe.loading.load`` creates it."""

    def __init__(
        self,
        reply: Reply,
        descriptors: list[int],
        request: Request,
        *,
        modules: tuple[int, ...] | None = None,
    ) -> None:
        """Take ownership of the descriptors; if it raises ProbeLoadError the caller still owns them.

        ``modules``: the probe was in the kernel before, attached to that driver.
        """
        names = (*reply.maps, *reply.programs, *reply.attached)
        if len(names) != len(descriptors):
            raise ProbeLoadError(
                "loader_failed", "The agent has no room for the probe's descriptors; raise LimitNOFILE"
            )
        numbers = iter(descriptors)
        self._maps = {name: next(numbers) for name in reply.maps}
        self._programs = {name: next(numbers) for name in reply.programs}
        self._links = {name: next(numbers) for name in reply.attached}
        self._roots: Final = request.roots
        self._doubles: Final = request.doubles
        self._removed = 0
        self._added = 0
        self._cpus = _possible_cpus()
        self._tries_left = REATTACH_TRIES
        self._modules = self._module_identity() if modules is None else modules
        self._reply: Final = reply
        self._request: Final = request
        self._pins: Pins | None = None
        self.not_pinned = ""
        """Why the probe is not pinned although that was requested."""
        self._is_closed = False
        self._follows_driver: Final = request.tier == "auto" and request.doubles is None
        self._considered: tuple[int, ...] = self._modules if reply.tier == "syscalls" else ()
        """The driver for which the tier was considered."""
        self.loader: Final = reply.loader
        self.tier: Final = reply.tier
        self.headers: Final = reply.headers
        """Release of the headers that were compiled with; empty for the precompiled object."""
        self.load_ms: Final = reply.load_ms
        self.attach_ms: Final = reply.attach_ms
        self.missing: Final = dict(reply.missing)
        """Programs that are not attached, and why."""
        self.entry_points: Final = dict(reply.entry_points)
        """The driver's function that each program of those is attached to."""
        self.why_not_driver: Final = reply.why_not_driver
        self._was_adopted: Final = modules is not None
        self.was_kept = self._was_adopted
        """It was in the kernel before, so its maps contain everything since it was loaded."""
        self.evictions = 0
        """Rows that the kernel evicted from the full table of processes; as of the last read."""
        try:
            self.ring: Final = Ring(self._maps["events"], self._ring_bytes(), EVENTS)
            self._config = self._read_config()
            if modules is not None:
                self.ring.skip()
                self._set_config(request.config()._replace(scan=self._config.scan))
        except OSError as error:
            raise ProbeLoadError(
                "loader_failed", f"The probe's maps cannot be read: {error}; use --probe-tier procfs"
            ) from error

    @property
    def attached(self) -> tuple[str, ...]:
        """Names of the programs that are attached."""
        return tuple(self._links)

    @property
    def config(self) -> ProbeConfig:
        """The settings of the programs."""
        return self._config

    # ---- kept for the next agent ----

    @property
    def pinned(self) -> str:
        """Where the probe is pinned for the next agent; empty: it is removed when this one exits."""
        return "" if self._pins is None else self._request.pins

    def keep(self, pins: Pins) -> None:
        """Pin the probe in the kernel for the next agent; ``not_pinned`` has the reason if that fails."""
        try:
            if not self._was_adopted:
                pins.put(self._kept(), self._kept_about())
            self._pins = pins
        except PinsUnusableError as error:
            self.not_pinned = str(error)

    def _kept(self) -> dict[str, int]:
        groups = {"map": self._maps, "program": self._programs, "link": self._links}
        return {f"{kind}_{name}": fd for kind, group in groups.items() for name, fd in group.items()}

    def _kept_about(self) -> About:
        reply = replace(
            self._reply,
            attached=self.attached,
            programs=tuple(self._programs),
            missing=dict(self.missing),
            entry_points=dict(self.entry_points),
        )
        sizes = (self._request.ring_bytes, self._request.processes)
        return About(asdict(reply), self._modules, sizes)

    def _keep_links(self) -> None:
        """Pin the present attachments instead of the earlier ones."""
        if self._pins is None:
            return
        try:
            self._pins.put(self._kept(), self._kept_about())
        except PinsUnusableError as error:
            self._pins, self.not_pinned = None, str(error)

    def copy_rows_of(self, older: Mapping[str, int]) -> None:
        """Copy the rows of the maps of another probe, which is still attached; this probe's own are newer.

        Takes 0.5 s for full maps. Objects that are freed meanwhile are deleted again.
        """
        for name in _COPIED:
            key_bytes, value_bytes = SIZES[name]
            rows = syscalls.map_rows(older[name], key_bytes, value_bytes)
            pairs = zip(_cut(rows.keys, key_bytes), _cut(rows.values, value_bytes), strict=True)
            put = [key for key, value in pairs if self._put_row(name, key, value)]
            there = set(_cut(syscalls.map_rows(older[name], key_bytes, value_bytes).keys, key_bytes))
            syscalls.map_delete_keys(self._maps[name], [key for key in put if key not in there])
        self.was_kept = True

    def _put_row(self, name: str, key: bytes, value: bytes) -> bool:
        try:
            return syscalls.map_update(self._maps[name], key, value, syscalls.NOEXIST)
        except OSError:  # it is full
            return False

    @property
    def maps(self) -> Mapping[str, int]:
        """Descriptors of the maps, by name."""
        return self._maps

    # ---- maps ----

    def read_objects(self) -> list[RmObject]:
        """Return the live objects; 5 ms for 8,000."""
        rows = syscalls.map_rows(self._maps["objects"], OBJECT_KEY.size, OBJECT.size)
        return decode_objects(rows.keys, rows.values)

    def read_openings(self) -> dict[int, int]:
        """Return the open time of each file opened since the probe was attached, by address."""
        rows = syscalls.map_rows(self._maps["openings"], OPENING_KEY.size, OPENING.size)
        keys, values = OPENING_KEY.iter_unpack(rows.keys), OPENING.iter_unpack(rows.values)
        return {file: at_ns for (file,), (at_ns,) in zip(keys, values, strict=True)}

    def read_processes(self) -> list[ProcessCounters]:
        """Return what each process did; 4 ms for 8,000."""
        rows = self._process_rows()
        return decode_processes(rows.keys, rows.values)

    def read_ended(self, before_ns: int) -> list[tuple[int, int]]:
        """Return pid and start, in clock ticks, of the processes that exited before a time; 30 ms for all."""
        rows = self._process_rows()
        return decode_ended(rows.keys, rows.values, before_ns)

    def _process_rows(self) -> syscalls.Rows:
        added = self.read_statistics().processes_added + self._added
        rows = syscalls.map_rows(self._maps["processes"], PROCESS_KEY.size, PROCESS.size)
        # Rows added since make this too low, never too high; the next read corrects it.
        self.evictions = max(self.evictions, added - self._removed - rows.total)
        return rows

    def read_statistics(self) -> ProbeStatistics:
        """Return what the programs counted, over all CPUs."""
        size = STATISTICS.size * self._cpus
        value = syscalls.map_lookup(self._maps["statistics"], _FIRST, size)
        return decode_statistics(value or bytes(STATISTICS.size))

    def forget_objects(self, gone: Iterable[tuple[int, int, int]]) -> None:
        """Delete objects, by client, handle and time of creation, that were freed with their parents.

        A newer object under the same handle stays; programs reuse handles at once.
        """
        objects = self._maps["objects"]
        taken_out: Counter[tuple[int, int]] = Counter()
        of_cgroup: Counter[int] = Counter()
        for client, handle, until_ns in gone:
            key = OBJECT_KEY.pack(client, handle)
            row = syscalls.map_lookup(objects, key, OBJECT.size)
            if row is None:
                continue
            at_ns, cgroup, _, start_ns, _, tgid, *_ = OBJECT.unpack(row)
            if at_ns <= until_ns and syscalls.map_delete(objects, key):
                taken_out[tgid, start_ns] += 1
                of_cgroup[cgroup] += 1
        for (tgid, start_ns), count in taken_out.items():
            self._make_room(tgid, start_ns, count)
        for cgroup, count in of_cgroup.items():
            if syscalls.map_lookup(self._maps["cgroups"], CGROUP_KEY.pack(cgroup), CGROUP.size) is not None:
                self._add_forgotten(cgroup | OF_CGROUP, 0, count)

    def _make_room(self, tgid: int, start_ns: int, count: int) -> None:
        """Count deleted objects of a process, so that it may have more; only the kernel writes its own count.

        A process that exited needs no row, which would only take the room of living ones.
        """
        if self._lives(PROCESS_KEY.pack(tgid), start_ns):
            self._add_forgotten(tgid, start_ns, count)
        elif self._forgotten(tgid, start_ns):
            syscalls.map_delete(self._maps["forgotten"], FORGOTTEN_KEY.pack(tgid))

    def _add_forgotten(self, name: int, start_ns: int, count: int) -> None:
        row = FORGOTTEN.pack(start_ns, count + self._forgotten(name, start_ns))
        syscalls.map_update(self._maps["forgotten"], FORGOTTEN_KEY.pack(name), row)

    def _forgotten(self, name: int, start_ns: int) -> int:
        """Return how many objects of a process or cgroup were deleted here, which the kernel still counts."""
        value = syscalls.map_lookup(self._maps["forgotten"], FORGOTTEN_KEY.pack(name), FORGOTTEN.size)
        before_ns, count = (0, 0) if value is None else FORGOTTEN.unpack(value)
        return int(count) if before_ns // NS_PER_TICK == start_ns // NS_PER_TICK else 0

    def _lives(self, key: bytes, start_ns: int) -> bool:
        """Return whether the kernel counts objects of a process."""
        row = syscalls.map_lookup(self._maps["processes"], key, PROCESS.size)
        if row is None:
            return False
        began_ns, exited_ns = PROCESS_LIFE.unpack(row)
        return not exited_ns and began_ns // NS_PER_TICK == start_ns // NS_PER_TICK

    def forget_processes(self, ended: Iterable[tuple[int, int]]) -> None:
        """Delete the rows of processes that exited, by pid and start in clock ticks.

        Their counts have to be read before. A new process with the same pid stays.
        """
        for tgid, start_ticks in ended:
            key = PROCESS_KEY.pack(tgid)
            row = syscalls.map_lookup(self._maps["processes"], key, PROCESS.size)
            if row is not None and _start_ticks(row) == start_ticks:
                self._removed += syscalls.map_delete(self._maps["processes"], key)
                syscalls.map_delete(self._maps["forgotten"], FORGOTTEN_KEY.pack(tgid))

    def watch(self, held: Iterable[HeldFile]) -> None:
        """Add rows for processes without one, so that the kernel sends their closes, forks and exits.

        They never opened a device, or their row was evicted. Their present objects count for their share.
        """
        now = time.monotonic_ns()
        # Checked first: a full table evicts a row for an update even if the key exists already.
        unknown = [one for one in {one.tgid: one for one in held}.values() if not self._has_row(one.tgid)]
        objects = self._count_objects() if unknown else Counter()
        for process in unknown:
            forgotten = self._forgotten(process.tgid, process.start_ticks * NS_PER_TICK)
            count = objects[process.tgid, process.start_ticks] + forgotten
            row = encode_process(process.cgroup_id, process.start_ticks, now, objects=count)
            key = PROCESS_KEY.pack(process.tgid)
            self._added += syscalls.map_update(self._maps["processes"], key, row, syscalls.NOEXIST)

    def _has_row(self, tgid: int) -> bool:
        key = PROCESS_KEY.pack(tgid)
        return syscalls.map_lookup(self._maps["processes"], key, PROCESS.size) is not None

    def _count_objects(self) -> Counter[tuple[int, int]]:
        """Return how many live objects each process has, by pid and start in clock ticks."""
        rows = syscalls.map_rows(self._maps["objects"], OBJECT_KEY.size, OBJECT.size)
        return Counter(
            (tgid, start_ns // NS_PER_TICK)
            for _, _, _, start_ns, _, tgid, *_ in OBJECT.iter_unpack(rows.values)
        )

    def traced_ring(self) -> Ring[TracedCall]:
        """Return the ring of a probe that traces, to be read instead of ``ring`` and closed by the caller."""
        return Ring(self._maps["events"], self._ring_bytes(), TRACED_CALLS)

    def _ring_bytes(self) -> int:
        return syscalls.map_info(self._maps["events"]).max_entries

    def read_traced(self) -> list[TracedCall]:
        """Return the calls of the traced process that have not returned."""
        rows = syscalls.map_rows(self._maps["traced"], TRACED_KEY.size, TRACED.size)
        return [decode_traced(rows.values, at) for at in range(0, len(rows.values), TRACED.size)]

    # ---- holders ----

    def scan(self) -> Scan:
        """Return the holders of open files: 8 ms for ten thousand descriptors, 50 ms without the iterator."""
        self._set_config(self._config._replace(scan=(self._config.scan + 1) & 0xFFFFFFFF))
        link = self._links.get(_ITERATOR)
        if link is None:
            return self._scan_procfs()
        try:
            data = _read_all(syscalls.iterator(link))
        except OSError:
            return self._scan_procfs()
        unseen = "" if len(data) < MAX_SCAN_BYTES else "there are more descriptors than are read"
        return Scan(decode_held(data), unseen, "kernel")

    def _scan_procfs(self) -> Scan:
        config = self._config
        return procfs.scan(
            majors=Majors(config.nvidia_major, config.uvm_major, config.caps_major),
            filesystem=config.test_filesystem,
        )

    # ---- readiness ----

    def read_readiness(self) -> dict[int, Readiness]:
        """Return the readiness of each minor that the agent called; the control device is minor 255."""
        flags = syscalls.map_rows(self._maps["devices"], INDEX.size, DEVICE.size).values
        checks = syscalls.map_rows(self._maps["checks"], INDEX.size, CHECK.size).values
        return {
            minor: Readiness(bool(flag), check)
            for minor, ((flag,), check) in enumerate(
                zip(DEVICE.iter_unpack(flags), map(Check._make, CHECK.iter_unpack(checks)), strict=True)
            )
            if check.calls
        }

    def set_ready(self, minor: int, *, ready: bool) -> None:
        """Set a device's flag: to not ready when its check did not return in time."""
        syscalls.map_update(self._maps["devices"], INDEX.pack(minor), DEVICE.pack(ready))

    # ---- the driver is loaded and unloaded ----

    def refresh(self) -> bool:
        """Read device numbers and the driver's version again; True if they changed. Once a poll."""
        before = self._config
        self.set_majors(kernel.majors(self._roots))
        self._set_config(self._config._replace(driver_branch=self.driver_branch()))
        return self._config != before

    def driver_branch(self) -> int:
        """Return the branch of the loaded driver; 0 where that is unknown."""
        return kernel.driver_branch(self._roots)

    def set_majors(self, majors: Majors) -> None:
        """Set the programs' device numbers; those of doubles and of unknown ones stay."""
        doubles = self._doubles
        self._set_config(
            self._config._replace(
                nvidia_major=(doubles and doubles.nvidia_major) or majors.nvidia or NVIDIA_MAJOR,
                uvm_major=(doubles and doubles.uvm_major) or majors.uvm,
                caps_major=majors.caps,
            )
        )

    def _set_config(self, config: ProbeConfig) -> None:
        if config != self._config:
            syscalls.map_update(self._maps["config"], _FIRST, config.pack())
            self._config = config

    def _read_config(self) -> ProbeConfig:
        value = syscalls.map_lookup(self._maps["config"], _FIRST, CONFIG.size)
        return ProbeConfig(*CONFIG.unpack(value or bytes(CONFIG.size)))

    def reattach(self) -> tuple[str, ...]:
        """Attach to a driver that was loaded since; return the newly attached programs. Once a poll.

        Costs two stats while nothing changed. Attachments to an unloaded module are dead.
        """
        if self.tier != "driver":
            return ()
        modules = self._module_identity()
        if modules != self._modules:
            self._modules = modules
            self._tries_left = REATTACH_TRIES
            self._detach_from_driver()
        waiting = [BY_NAME[name] for name in self._programs if name not in self._links]
        if not waiting or not any(modules) or not self._tries_left:
            return ()
        self._tries_left -= 1
        functions = kernel.entry_points(self._roots)
        outcome = attach(waiting, self._programs, sys_root=self._roots.sys, functions=functions)
        self._links.update(outcome.attached)
        self.entry_points.update(outcome.entry_points)
        for name in outcome.attached:
            self.missing.pop(name, None)
        self.missing.update(outcome.missing)
        if outcome.attached:
            self._keep_links()
        return tuple(outcome.attached)

    def is_outdated(self) -> bool:
        """Return whether the loaded driver needs another tier, once for each driver; once a poll."""
        modules = self._module_identity()
        if not self._follows_driver or not any(modules) or modules == self._considered:
            return False
        is_vital_missing = any(BY_NAME[name].vital for name in self.missing)
        if not kernel.majors(self._roots).nvidia or (is_vital_missing and self._tries_left):
            return False  # it is being loaded
        self._considered = modules
        if self.tier == "driver":
            return is_vital_missing
        return kernel.choose_tier("auto", self._roots, doubles=False) == "driver"

    def consider_again(self) -> None:
        """Have ``is_outdated`` answer once more for the driver that is loaded now."""
        self._considered = ()

    def _detach_from_driver(self) -> None:
        gone = [name for name in self._programs if name in self._links]
        self.entry_points.clear()
        _close_later([self._links.pop(name) for name in gone])
        self.missing.update(dict.fromkeys(gone, "the driver was unloaded"))

    def _module_identity(self) -> tuple[int, ...]:
        """Return numbers that change when a module is reloaded; 0 where it is not loaded."""
        return tuple(_inode(f"{self._roots.sys}/module/{name}") for name in DRIVER_MODULES)

    def close(self) -> None:
        """Remove the probe from the kernel unless it is pinned; that takes a second, in the background."""
        if self._is_closed:
            return
        self._is_closed = True
        self.ring.close()
        _close_later(
            [*self._links.values(), *self._programs.values(), *self._maps.values()],
            partial(remove_events, self._roots.sys),
        )


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def _start_ticks(row: bytes) -> int:
    start_ns, _ = PROCESS_LIFE.unpack(row)
    return int(start_ns) // NS_PER_TICK


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - a poll's
    except OSError:
        return 0


def _close_later(descriptors: list[int], then: Callable[[], object] = bool) -> None:
    def close() -> None:
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        then()

    try:
        threading.Thread(target=close, name="probe-close", daemon=True).start()
    except RuntimeError:  # no thread can be started
        close()


def _read_all(descriptor: int) -> bytes:
    try:
        return b"".join(_chunks(descriptor))
    finally:
        os.close(descriptor)


def _chunks(descriptor: int) -> Iterator[bytes]:
    room = MAX_SCAN_BYTES
    while room > 0 and (chunk := os.read(descriptor, min(_CHUNK_BYTES, room))):
        room -= len(chunk)
        yield chunk


def _possible_cpus() -> int:
    """Return how many values a per-CPU map has; nine for 0-3,8, since the kernel counts up to the last."""
    with open("/sys/devices/system/cpu/possible", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read().strip().rpartition(",")[2].rpartition("-")[2]) + 1
