"""The policy: the part of the configuration that the core applies."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from agent.model.health import Reason
from agent.model.sharing import Sharing

MigStrategy = Literal["none", "single", "mixed"]
XidPolicy = Literal["compat", "catalog"]
XidOverride = Literal["flip", "ignore"]
DeviceListStrategy = Literal["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"]
DeviceIdStrategy = Literal["uuid", "index"]
SharedAllocationPolicy = Literal["distributed", "packed", "spread"]

LeakEffect = Literal["warn", "unhealthy-when-free"]

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000
MEBIBYTE = 2**20


class LeakPolicy(msgspec.Struct, frozen=True):
    """When the use of a GPU is a finding. Times are how long it must last before it is reported."""

    is_watched: bool = True
    """False: the use of GPUs is not read, so that there is no finding and earlier ones are dropped."""
    effect: LeakEffect = "warn"
    """unhealthy-when-free: what certainly blocks a GPU that no pod has takes it out, through the breaker."""
    allowed: frozenset[str] = frozenset(
        {
            "nvidia-persistenced",
            "nv-hostengine",
            "nvidia-dcgm",
            "dcgm",
            "nv-fabricmanager",
            "nvidia-fabricmanager",
            "dcgm-exporter",
            "nvidia-device-plugin",
            "gpu-feature-discovery",
            "nvidia-cuda-mps-control",
        }
    )
    """System services and executables of root's of which nothing is ever reported, and what processes of
    ``namespaces`` call themselves; the kernel keeps 15 bytes of that."""
    servers: frozenset[str] = frozenset({"nvidia-cuda-mps-server"})
    """The same for servers that use GPUs for other processes: they may grow and belong to no pod."""
    namespaces: frozenset[str] = frozenset(
        {"kube-system", "gpu-operator", "nvidia-gpu-operator", "nvidia-device-plugin", "gpu-agent"}
    )
    """Namespaces in which only a cluster's administrators start pods."""
    orphaned_client_ns: int = 30 * SECOND_NS
    pod_gone_ns: int = 60 * SECOND_NS
    stuck_exit_ns: int = 60 * SECOND_NS
    foreign_process_ns: int = 60 * SECOND_NS
    memory_held_ns: int = 300 * SECOND_NS
    memory_held_bytes: int = 512 * MEBIBYTE
    memory_held_percent: int = 2
    """Of the GPU's memory; the larger of both counts."""
    idle_ns: int = 3600 * SECOND_NS
    """A device that a pod has and no process opened for so long is reported."""
    contexts_many: int = 100
    """More contexts on one GPU than that are reported."""
    growth_window_ns: int = 600 * SECOND_NS
    growth_warm_up_ns: int = 120 * SECOND_NS
    """From the first file that a process opened; what it makes meanwhile is no growth."""
    growth_min_live: int = 4
    growth_min_new: int = 3
    growth_freed_percent: int = 20
    """A process that frees more than this share of what it makes does not leak."""
    growth_critical_live: int = 16
    growth_fds: int = 90
    """Descriptors, where contexts are not known; about three or four contexts."""


class Injection(msgspec.Struct, frozen=True):
    """How devices are put into containers; names and meanings are those of NVIDIA's plugin."""

    strategies: tuple[DeviceListStrategy, ...] = ("envvar",)
    ids: DeviceIdStrategy = "uuid"
    """The ids in a container; the kubelet's ids stay UUIDs."""
    pass_device_specs: bool = False
    device_root: str = "/"
    """Where /dev/nvidia* are on the host, put before every host path of a device spec."""
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    gdrcopy: bool = False
    gds: bool = False
    mofed: bool = False
    imex_channels: tuple[int, ...] = ()
    imex_required: bool = False
    mps_root: str = ""
    """On the host; empty where MPS is not used."""


class Policy(msgspec.Struct, frozen=True):
    """Settings of the core. Defaults are the product's; scenarios and tests set shorter times."""

    mig_strategy: MigStrategy = "none"
    sharing: Sharing = msgspec.field(default_factory=Sharing)
    injection: Injection = msgspec.field(default_factory=Injection)
    shared_allocation: SharedAllocationPolicy = "distributed"
    """Which replicas to prefer: of the GPU with the fewest allocated, or with the most, or of one after
    another."""
    pre_start_check: bool = False
    """Reject the start of a container on a device with hard evidence against it."""
    xid_policy: XidPolicy = "compat"
    """compat: what NVIDIA's plugin flips on; catalog: what NVIDIA's catalog calls more than the
    application's business."""
    xid_overrides: Mapping[int, XidOverride] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """The last word on single XIDs."""
    xids_off: bool = False
    """No XID flips but those of ``xid_overrides`` (DP_DISABLE_HEALTHCHECKS=all)."""
    xids_all: bool = False
    """Every XID flips but those of ``xid_overrides`` (DP_ENABLE_HEALTHCHECKS=all)."""
    observe: bool = False
    """Decide and report everything, register nothing."""
    soft_flips: frozenset[Reason] = frozenset()
    """Reasons with soft evidence that may flip a free device, through the breaker."""
    soft_flip_every_ns: int = 3600 * SECOND_NS
    """The breaker: at most one device of the node in this time."""
    leaks: LeakPolicy = msgspec.field(default_factory=LeakPolicy)
    recovery_clean_probes: int = 3
    recovery_quiet_ns: int = 60 * SECOND_NS
    sticky_after: int = 3
    """So many self-clearing faults of a GPU within ``sticky_window_ns`` are flapping."""
    sticky_window_ns: int = 600 * SECOND_NS
    slowdown_window_polls: int = 60
    slowdown_share_percent: int = 60
    """Clocks held down by hardware in this share of the window is a thermal condition."""
    first_probe_wait_ns: int = 150 * MILLISECOND_NS
    """How long registration waits for the first probe of each GPU."""
    watch_timeout_ns: int = 10 * SECOND_NS
    """A registration after which the kubelet opened no ListAndWatch for so long is made anew."""
    jitter_seed: int = 0
    """Spreads retries of many nodes; the core has no random numbers of its own."""
