"""Builds sources and sinks from the settings; each is imported when it is made, which may take a while."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from agent.bus import Inbox, Latest
from agent.config.settings import Settings
from agent.core.freshness import Terms
from agent.model.components import CDI
from agent.model.effects import ProbeGpu, ProbeGpus, ProbeUvm, ReleaseDriver, ResumeDriver
from agent.model.facts import KERNEL_LOG, KUBELET, MPS, PODS, PROBE, SYSFS, Fact
from agent.model.ids import ComponentId, GpuUuid, SourceName
from agent.model.policy import SECOND_NS
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs

if TYPE_CHECKING:
    from agent.sinks.cdi.sink import CdiSink
    from agent.sinks.plugin.sink import DevicePlugin
    from agent.sources.ebpf.source import EbpfSource
    from agent.sources.kmsg import KernelLogSource
    from agent.sources.kubelet import KubeletSource
    from agent.sources.nvml.source import NvmlSource
    from agent.sources.pods.source import PodsSource
    from agent.sources.sysfs import SysfsSource

CHECKPOINT: Final = "kubelet_internal_checkpoint"
"""In the directory of the kubelet's socket. Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go."""
MAX_RECHECK_NS: Final = 30 * SECOND_NS
MISSED_POLLS: Final = 3
"""After so many a GPU's device file was not called on, it is not known to answer."""

_OWN_DEV: Final = Path("/dev")
"""What a container has, and lacks what came to the node after it was made."""


def _pins(directory: str, *, is_simulated: bool) -> str:
    """Return where the probe is kept; what was kept earlier and is not wanted any more is removed."""
    from agent.probe.pins import DIRECTORY, Pins

    if is_simulated:
        return "" if directory == DIRECTORY else directory
    if not directory:
        Pins(DIRECTORY).remove_all()
    return directory


class Source(Protocol):
    """What is run."""

    async def run(self) -> None:
        """Watch until cancelled."""


class Assembly:
    """Makes what the settings ask for, and keeps what others need."""

    def __init__(
        self,
        settings: Settings,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        clock: Callable[[], int],
        *,
        proofs: Proofs,
        is_in_container: bool,
    ) -> None:
        self.settings = settings
        self.is_in_container = is_in_container
        self.inbox = inbox
        self.latest = latest
        self.clock = clock
        self._proofs = proofs
        self.nvml: NvmlSource | None = None
        self.kernel_log: KernelLogSource | None = None
        self.sysfs: SysfsSource | None = None
        self.pods: PodsSource | None = None
        self.ebpf: EbpfSource | None = None
        self.cdi: CdiSink | None = None

    @property
    def recheck_ns(self) -> int:
        """How often what waits for events polls too: the kubelet's socket, the configuration, CDI files."""
        return min(MAX_RECHECK_NS, MISSED_POLLS * self.settings.poll_ns)

    def make_nvml(self, *, released: bool) -> "NvmlSource":
        """Make the source that owns the driver; ``released`` as an operator ordered it before."""
        from agent.sources.nvml.source import LibraryLocation, NvmlSettings, NvmlSource

        settings = self.settings
        self.nvml = NvmlSource(
            inbox=self.inbox,
            library=LibraryLocation(
                path=Path(settings.nvml_library) if settings.nvml_library else None,
                driver_root=self.driver_root,
            ),
            dev_root=self.dev_root,
            sys_root=Path(settings.sys_root),
            proc_root=Path(settings.proc_root),
            clock=self.clock,
            settings=NvmlSettings(
                init_deadline_ns=settings.init_deadline_ns,
                first_handle_deadline_ns=settings.first_handle_deadline_ns,
                call_deadline_ns=settings.call_deadline_ns,
                poll_ns=settings.poll_ns,
                init_retry_ns=settings.init_retry_ns,
            ),
            released=released,
            calls_devices=self._probe_runs,
            proofs=self._proofs,
        )
        return self.nvml

    def make_cdi(self) -> "CdiSink":
        """Make the sink that writes CDI specifications, where the policy asks for any."""
        from agent.sinks.cdi.sink import CdiSink

        self.cdi = CdiSink(
            emit=self.inbox.put,
            latest=self.latest,
            settings=self.settings.cdi,
            sys_root=self.settings.sys_root,
            is_in_container=self.is_in_container,
            clock=self.clock,
            recheck_ns=self.recheck_ns,
            prove=self._prover(CDI),
        )
        return self.cdi

    def make_device_plugin(self) -> "DevicePlugin":
        """Make the sink that advertises devices to the kubelet."""
        from agent.sinks.plugin.sink import DevicePlugin

        return DevicePlugin(
            inbox=self.inbox,
            latest=self.latest,
            kubelet_socket=Path(self.settings.kubelet_socket_or_default),
            clock=self.clock,
            registers=self.settings.registers,
            cdi=self.cdi,
            proofs=self._proofs,
        )

    def make_kubelet(self) -> "KubeletSource":
        """Make the source that watches the kubelet's socket."""
        from agent.sources.kubelet import KubeletSettings, KubeletSource

        return KubeletSource(
            inbox=self.inbox,
            latest=self.latest,
            kubelet_socket=Path(self.settings.kubelet_socket),
            clock=self.clock,
            settings=KubeletSettings(recheck_ns=self.recheck_ns),
            prove=self._prover(KUBELET),
        )

    def make_kernel_log(self) -> Source:
        """Make the source that reads the kernel log, from where an earlier agent of this boot ended."""
        from agent.sources.kmsg import KernelLogSource

        path = Path(self.settings.kernel_log)
        self.kernel_log = KernelLogSource(
            inbox=self.inbox,
            path=path,
            clock=self.clock,
            read_until=self.latest.value.durable.kernel_log_read,
            period_ns=self.settings.poll_ns,
            prove=self._prover(KERNEL_LOG),
        )
        return self.kernel_log

    def make_sysfs(self) -> Source:
        """Make the source that polls the bus and device nodes."""
        from agent.sources.sysfs import SysfsSource

        self.sysfs = SysfsSource(
            inbox=self.inbox,
            latest=self.latest,
            sys_root=Path(self.settings.sys_root),
            proc_root=Path(self.settings.proc_root),
            dev_root=self.dev_root,
            sees_new_nodes=not self.is_in_container or self.dev_root != _OWN_DEV,
            clock=self.clock,
            period_ns=self.settings.poll_ns,
            probe_layout=self._probe_layout,
            prove=self._prover(SYSFS),
        )
        return self.sysfs

    def make_uevents(self) -> Source:
        """Make the source that gets the kernel's events of the bus."""
        from agent.sources.uevent import UeventSource

        return UeventSource(
            inbox=self.inbox,
            sys_root=Path(self.settings.sys_root),
            on_change=self._rescan_changes,
            on_loss=self._rescan_all,
        )

    def make_mps(self, mps_root: str, terms: Terms) -> Source:
        """Make the source that watches whether the MPS control daemon serves."""
        from agent.sources.mps import MpsSettings, MpsSource

        settings = MpsSettings(recheck_ns=terms.period_ns, deadline_ns=terms.deadline_ns)
        return MpsSource(
            inbox=self.inbox, mps_root=Path(mps_root), settings=settings, prove=self._prover(MPS)
        )

    def make_pods(self) -> Source:
        """Make the source that asks which pod holds what."""
        from agent.sources.pods.finished import FinishedPods
        from agent.sources.pods.source import PodsSource

        self.pods = PodsSource(
            inbox=self.inbox,
            socket=Path(self.settings.pod_resources_socket),
            pod_logs=Path(self.settings.pod_logs_dir),
            checkpoint=Path(self.settings.kubelet_socket_or_default).parent / CHECKPOINT,
            clock=self.clock,
            period_ns=self.settings.pods_poll_ns,
            finished=FinishedPods(
                Path(self.settings.sys_root, "fs/cgroup"), kubelet_root=self.settings.kubelet_cgroup_root
            ),
            prove=self._prover(PODS),
        )
        return self.pods

    def make_kubelet_count(self) -> Source:
        """Make the source that asks the kubelet which devices it has."""
        from agent.sources.kubelet_count import KubeletCountSource

        return KubeletCountSource(
            inbox=self.inbox,
            latest=self.latest,
            socket=Path(self.settings.pod_resources_socket),
            clock=self.clock,
            proofs=self._proofs,
            period_ns=self.settings.kubelet_count_poll_ns,
        )

    def make_ebpf(self) -> Source:
        """Make the source that observes in the kernel which process uses which GPU."""
        from agent.probe.kernel import Roots, filesystem_of_doubles
        from agent.probe.request import Doubles, Request
        from agent.sources.ebpf.rounds import EbpfSettings
        from agent.sources.ebpf.source import EbpfSource
        from agent.sources.processes import hierarchy

        settings = self.settings
        doubles = filesystem_of_doubles(settings.probe_doubles)
        tier = settings.probe_tier
        is_simulated = doubles is not None or settings.proc_root != "/proc"
        self.ebpf = EbpfSource(
            inbox=self.inbox,
            latest=self.latest,
            request=Request(
                loader=settings.probe_loader,
                roots=Roots(node_proc=settings.proc_root),
                doubles=Doubles(filesystem=doubles) if doubles else None,
                answer_within_ns=settings.call_deadline_ns,
                pins=_pins(settings.probe_pins, is_simulated=is_simulated),
            ),
            tier="auto" if tier == "off" else tier,
            # A simulated node has device files of its own, but its processes are the machine's.
            proc_root=Path("/proc" if doubles else settings.proc_root),
            agent_pid=os.getpid(),
            where=hierarchy(settings.kubelet_cgroup_root),
            clock=self.clock,
            prove=self._prover(PROBE),
            settings=EbpfSettings(
                procfs_scan_ns=settings.poll_ns,
                stale_call_ns=MISSED_POLLS * settings.poll_ns + settings.call_deadline_ns,
            ),
        )
        return self.ebpf

    def _prover(self, name: SourceName) -> Callable[[], None]:
        """Return what a component calls with each proof."""
        return partial(self._proofs.prove, ComponentId(name))

    def close_ebpf(self) -> None:
        """Take the probe out of the kernel."""
        if self.ebpf is not None:
            self.ebpf.close()

    def recent_kernel_log(self) -> tuple[str, ...]:
        """Return the driver's newest lines in the kernel log."""
        return () if self.kernel_log is None else self.kernel_log.recent()

    def perform(self, effect: ProbeGpu | ProbeGpus | ProbeUvm | ReleaseDriver | ResumeDriver) -> None:
        """Do what the effect asks of the sources that read GPUs, as far as they were made."""
        if self.sysfs is not None:
            match effect:
                case ProbeGpu():
                    self.sysfs.read_config(effect.pci)
                case ProbeUvm():
                    self.sysfs.probe_uvm()
        if self.nvml is not None:
            match effect:
                case ProbeGpu():
                    self.nvml.probe_soon(effect.gpu)
                case ProbeGpus():
                    self.nvml.request()
                case ReleaseDriver():
                    self.nvml.release()
                case ResumeDriver():
                    self.nvml.resume()

    def _probe_layout(self, gpu: GpuUuid) -> None:
        if self.nvml is not None:
            self.nvml.request_gpu(gpu)

    def _rescan_changes(self) -> None:
        """Rescan after GPUs or modules came or went, of which uevents reported what was bound."""
        if self.sysfs is not None:
            self.sysfs.follow_up()
        if self.nvml is not None:
            self.nvml.request()

    def _rescan_all(self) -> None:
        """Rescan where uevents may not have reported everything."""
        if self.sysfs is not None:
            self.sysfs.request()
        if self.nvml is not None:
            self.nvml.request()

    def _probe_runs(self) -> bool:
        probe = self.latest.value.probe
        return probe is not None and probe.state == "running"

    @property
    def _mounted(self) -> Path | None:
        """Where this container has the node's driver root; None: it has none, or this is no container."""
        mounted = Path(self.settings.cdi.driver_root_ctr_path)
        return mounted if self.is_in_container and mounted.is_dir() else None

    @property
    def driver_root(self) -> Path:
        """Where the driver is installed, as this process sees it."""
        return self._mounted or Path(self.settings.driver_root)

    @property
    def dev_root(self) -> Path:
        """Where the node's device nodes are, as this process sees them."""
        of_settings = Path(self.settings.dev_root, "dev")
        if not self.is_in_container:
            return of_settings
        # A root is a path of the node, which its containers need not have.
        candidates = (*(() if self._mounted is None else (self._mounted / "dev",)), of_settings)
        return next((each for each in candidates if each.is_dir()), _OWN_DEV)
