"""Scans /sys, /proc and /dev: GPUs on the bus, the driver's module, device nodes.

Guarantees:

1. A change is emitted once. What cannot be read is not emitted: an agent without /sys knows nothing of a bus.
2. The loop never waits for a file. A scan runs in a thread, one at a time; one that does not return
   within ``deadline_ns`` stops the source with an error, and no second one is started until it returns.
3. Device nodes are checked only for GPUs that the driver serves now: without the driver there are none.
   Those of MIG devices only where no container could get the device without them.
4. The nodes of a MIG device disappear with it, and NVML is polled only now and then. So the source requests
   a probe of that GPU first, and such a node is missing only if it is still needed ``confirm_ns``
   (3 s, at most a period) later.
5. Reports of the kernel log are verified where possible: ``read_config`` reads the PCI configuration space
   of a GPU in the next scan, ``probe_uvm`` opens /dev/nvidia-uvm in each scan until that succeeds, while
   the driver is not released.
6. The inodes of a GPU's directory and link show that it was bound again between two scans, so
   resets are found where no uevents arrive, up to a period late. Where they do arrive they report it at
   once, and a scan by ``follow_up`` does not emit it again: a fault since then must not count as one before.

*Cost:* one scan every ``period_ns`` (10 s; while a node is missing, 1 s), at most one in MIN_GAP_NS on
request; about 10 microseconds for each PCI function of the node and 3 for each device node, so 2 ms of a
thread on a large node. A scan has ``deadline_ns`` (5 s).
"""

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from agent import guard
from agent.bus import Inbox, Latest
from agent.core.allocation.injection import gives_capabilities
from agent.core.allocation.nodes import is_capability, owners, wanted_nodes
from agent.errors import SourceError
from agent.model.facts import (
    SYSFS,
    DeviceNodesSeen,
    DriverModuleSeen,
    Fact,
    GpuRebound,
    PciConfigRead,
    PciGpusSeen,
    UvmProbed,
)
from agent.model.health import Reason
from agent.model.ids import GpuUuid
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.snapshot import Snapshot
from agent.sources.sysfs_scan import Binding, Exclusions, Roots, SysfsScan, scan_sysfs
from agent.threads import started_in_daemon_thread

PERIOD_NS: Final = 10 * SECOND_NS
MISSING_PERIOD_NS: Final = SECOND_NS
"""The same while a node is missing: those of a new MIG layout appear a moment after it."""
DEADLINE_NS: Final = 5 * SECOND_NS
CONFIRM_NS: Final = 3 * SECOND_NS
"""How long NVML may take to list another MIG layout."""
MIN_GAP_NS: Final = 50 * MILLISECOND_NS
"""Between the starts of two requested scans."""


class SysfsSource:
    """Emits changes of GPUs on the bus, of the driver's module and of missing device nodes."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        sys_root: Path,
        proc_root: Path,
        dev_root: Path,
        clock: Callable[[], int],
        period_ns: int = PERIOD_NS,
        deadline_ns: int = DEADLINE_NS,
        confirm_ns: int = CONFIRM_NS,
        probe_layout: Callable[[GpuUuid], None] = lambda _: None,
        strict_nodes: bool | None = None,
        sees_new_nodes: bool = True,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """Scan below the roots that stand for /sys, /proc and /dev.

        ``strict_nodes``: device nodes have to be character devices; by default below /dev itself.
        ``probe_layout``: requests a probe of a GPU's MIG devices.
        ``sees_new_nodes``: False for a container's own /dev, which lacks nodes created after its start.
        """
        strict = dev_root == Path("/dev") if strict_nodes is None else strict_nodes
        self._inbox = inbox
        self._latest = latest
        self._roots = Roots(sys_root, proc_root, dev_root, strict)
        self._sees_new_nodes = sees_new_nodes
        self._clock = clock
        self._prove = prove
        self._period_ns = period_ns
        self._missing_period_ns = min(period_ns, MISSING_PERIOD_NS)
        self._deadline_ns = deadline_ns
        self._confirm_ns = min(period_ns, confirm_ns)
        self._probe_layout = probe_layout
        self._missing_since_ns: dict[str, int] = {}
        """Since when a capability node is missing, by path."""
        self._asked = asyncio.Event()
        self._bindings_emitted = False
        self._configs_asked: set[str] = set()
        """Addresses; those of known GPUs, so there are few."""
        self._uvm_asked = False
        self._scanning: asyncio.Future[SysfsScan] | None = None
        self._exclusions = Exclusions()
        self._emitted: dict[type[Fact], Fact] = {}
        self._bindings: dict[str, Binding] = {}
        self._bound: frozenset[str] = frozenset()
        self.last_sign_ns: int | None = None
        """When the last scan completed."""

    def request(self) -> None:
        """Scan soon instead of after the period; on the loop's thread."""
        self._asked.set()

    def follow_up(self) -> None:
        """Scan soon after a change; the caller has emitted which GPUs were bound and unbound."""
        self._bindings_emitted = True
        self._asked.set()

    def read_config(self, pci: str) -> None:
        """Read the configuration space of a GPU in the next scan, which is soon; on the loop's thread."""
        self._configs_asked.add(pci)
        self._asked.set()

    def probe_uvm(self) -> None:
        """Open /dev/nvidia-uvm in the next scans, of which one is soon; on the loop's thread."""
        self._uvm_asked = True
        self._asked.set()

    async def run(self) -> None:
        """Scan until cancelled; raises SourceError if the kernel does not answer. No two at once."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    guard.run_forever("sysfs scans", self._scan_periodically), name="sysfs scans"
                )
                group.create_task(
                    guard.run_forever("sysfs new nodes", self._ask_for_new_nodes), name="sysfs new nodes"
                )
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _scan_periodically(self) -> None:
        while True:
            began_ns = self._clock()
            self._asked.clear()
            bindings_emitted, self._bindings_emitted = self._bindings_emitted, False
            seen = await self._scan()
            self._emit_scan(seen, bindings_emitted=bindings_emitted)
            self.last_sign_ns = self._clock()
            self._prove()
            await self._wait_asked(began_ns + (self._missing_period_ns if seen.missing else self._period_ns))
            await asyncio.sleep(max(0, began_ns + MIN_GAP_NS - self._clock()) / 1e9)

    async def _wait_asked(self, until_ns: int) -> None:
        try:
            async with asyncio.timeout(max(0, until_ns - self._clock()) / 1e9):
                await self._asked.wait()
        except TimeoutError:
            return

    async def _ask_for_new_nodes(self) -> None:
        """Request a scan as soon as other nodes are needed."""
        version = self._latest.version
        nodes = self._wanted_nodes()
        while True:
            version = await self._latest.wait_newer(version)
            wanted = self._wanted_nodes()
            if wanted != nodes:
                nodes = wanted
                self.request()

    def _wanted_nodes(self) -> frozenset[str] | None:
        """Return the nodes that should exist; None while the driver is unavailable or released."""
        snapshot = self._latest.value
        if not snapshot.driver.ready or snapshot.released_until_ns is not None:
            return None
        return wanted_nodes(
            (view.gpu for view in snapshot.gpus if view.present),
            with_capabilities=gives_capabilities(snapshot.policy, sees_new_nodes=self._sees_new_nodes),
        )

    async def _scan(self) -> SysfsScan:
        if self._scanning is None:
            roots, nodes, known = self._roots, self._wanted_nodes(), self._exclusions
            configs, self._configs_asked = self._configs_asked, set()
            uvm = nodes is not None and (self._uvm_asked or self._uvm_failed())
            self._scanning = started_in_daemon_thread(
                "sysfs-scan", lambda: scan_sysfs(roots, nodes, known, configs=configs, uvm=uvm)
            )
        scanning = self._scanning
        await asyncio.wait((scanning,), timeout=self._deadline_ns / 1e9)
        if not scanning.done():
            raise SourceError(
                f"Scanning {self._roots.sys}, {self._roots.proc} and {self._roots.dev} did not finish "
                f"within {self._deadline_ns / SECOND_NS:g} s; see the kernel log for blocked tasks"
            )
        self._scanning = None
        return scanning.result()

    # Facts

    def _emit_scan(self, seen: SysfsScan, *, bindings_emitted: bool) -> None:
        self._exclusions = seen.exclusions
        self._emit_probes(seen)
        if seen.gpus is not None:
            if not bindings_emitted:
                self._emit_bindings(seen)
            self._bound = frozenset(seen.bindings)
            # Bindings of absent GPUs are kept, so that a return is recognised; a PCI slot has one address.
            self._bindings.update(seen.bindings)
            self._emit_changed(PciGpusSeen(addresses=seen.gpus))
        if seen.module_visible:
            self._emit_changed(DriverModuleSeen(inode=seen.module))
        if seen.missing is not None and (seen.module is not None or not seen.module_visible):
            self._emit_changed(DeviceNodesSeen(missing=self._confirmed(seen.missing)))

    def _confirmed(self, missing: tuple[str, ...]) -> tuple[str, ...]:
        """Return the nodes that are missing although there was time to probe their GPUs since."""
        now_ns, before = self._clock(), self._missing_since_ns
        self._missing_since_ns = {path: before.get(path, now_ns) for path in missing if is_capability(path)}
        for gpu in self._gpus_of(self._missing_since_ns.keys() - before.keys()):
            self._probe_layout(gpu)
        return tuple(
            path for path in missing if now_ns - self._missing_since_ns.get(path, 0) >= self._confirm_ns
        )

    def _gpus_of(self, paths: Collection[str]) -> set[GpuUuid]:
        if not paths:
            return set()
        of_device = owners(view.gpu for view in self._latest.value.gpus if view.present)
        return {place.gpu for path in paths for place in of_device.get(path, ())}

    def _emit_probes(self, seen: SysfsScan) -> None:
        for pci, answers in seen.configs.items():
            self._inbox.put(PciConfigRead(pci=pci, answers=answers))
        if seen.uvm is not None:
            self._uvm_asked = bool(seen.uvm)
            self._inbox.put(UvmProbed(error=seen.uvm or None))

    def _uvm_failed(self) -> bool:
        """Whether opening UVM failed before, as an earlier process may have found."""
        return any(
            condition.reason is Reason.UVM_FAILED and condition.lasts
            for view in self._latest.value.gpus
            for condition in view.conditions
        )

    def _emit_bindings(self, seen: SysfsScan) -> None:
        for pci in sorted(self._bound - seen.bindings.keys()):
            self._inbox.put(GpuRebound(pci=pci, bound=False, source=SYSFS))
        for pci, binding in seen.bindings.items():
            is_known = pci in self._bindings
            if is_known and (pci not in self._bound or self._bindings[pci] != binding):
                self._inbox.put(GpuRebound(pci=pci, bound=True, source=SYSFS))

    def _emit_changed(self, fact: PciGpusSeen | DriverModuleSeen | DeviceNodesSeen) -> None:
        if self._emitted.get(type(fact)) != fact:
            self._emitted[type(fact)] = fact
            self._inbox.put(fact)
