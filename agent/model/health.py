"""Why a device is unhealthy: reasons, and the conditions that carry them."""

from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

from agent.model.ids import Placement, SourceName
from agent.model.usage import Certainty, Owner


class Health(StrEnum):
    """Health of a device or GPU. On the wire, where two states exist, UNKNOWN is sent as Unhealthy."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """HARD: the device reports it. SOFT: the agent infers it."""

    HARD = "hard"
    SOFT = "soft"


class Severity(StrEnum):
    """The severity of a reason for operators; only CRITICAL ones may flip a device."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class Recovery(StrEnum):
    """What must be seen before a condition is cleared."""

    SELF_CLEARING = "self_clearing"
    """Clean probes in a row, over quiet time."""
    RESET = "reset"
    """Reset evidence (device re-bound, driver re-initialised), then as SELF_CLEARING."""
    REBOOT = "reboot"
    """A new boot id."""
    BY_HAND = "by_hand"
    """Only a person, over reboots too."""


class Reason(StrEnum):
    """Closed set of reason codes; core.reasons has the row of each."""

    XID = "xid"
    UNCONFIRMED = "unconfirmed"
    GPU_LOST = "gpu_lost"
    RESET_REQUIRED = "reset_required"
    RECOVERY_ACTION = "recovery_action"
    IMEX_DOMAIN_DOWN = "imex_domain_down"
    ECC_UNCORRECTED = "ecc_uncorrected"
    ROW_REMAP_FAILED = "row_remap_failed"
    ROW_REMAP_PENDING = "row_remap_pending"
    NVLINK_DOWN = "nvlink_down"
    FABRIC_NOT_READY = "fabric_not_ready"
    FABRIC_FAILED = "fabric_failed"
    THERMAL = "thermal"
    PCIE_DEGRADED = "pcie_degraded"
    NVML_ERROR = "nvml_error"
    NVML_TIMEOUT = "nvml_timeout"
    DRIVER_HUNG = "driver_hung"
    UVM_FAILED = "uvm_failed"
    DRIVER_NOT_LOADED = "driver_not_loaded"
    NVML_VERSION_MISMATCH = "nvml_version_mismatch"
    DEVICE_NODE_MISSING = "device_node_missing"
    GPU_COUNT_MISMATCH = "gpu_count_mismatch"
    FLAPPING = "flapping"
    MAINTENANCE = "maintenance"
    HELD = "held"
    KUBELET_UNAVAILABLE = "kubelet_unavailable"
    REGISTRATION_REFUSED = "registration_refused"
    KUBELET_COUNT_MISMATCH = "kubelet_count_mismatch"
    SOCKET_IN_USE = "socket_in_use"
    SOURCE_FAILED = "source_failed"
    MIG_SINGLE_NOT_UNIFORM = "mig_single_not_uniform"
    IMEX_CHANNEL_MISSING = "imex_channel_missing"
    STATE_LOST = "state_lost"
    MPS_NOT_READY = "mps_not_ready"
    MPS_REPLICAS_OVER_LIMIT = "mps_replicas_over_limit"
    LIST_TOO_LONG = "list_too_long"
    CDI_UNRESOLVABLE = "cdi_unresolvable"
    NOT_PROBED = "not_probed"
    NOT_ENOUGH_GPUS = "not_enough_gpus"
    CONTEXT_LEAK = "context_leak"
    MEMORY_HELD_NO_PROCESS = "memory_held_no_process"
    FOREIGN_PROCESS = "foreign_process"
    ALLOCATED_IDLE = "allocated_idle"
    MANY_CONTEXTS = "many_contexts"


class LeakKind(StrEnum):
    """Kinds of findings on the use of a GPU; the first five are of CONTEXT_LEAK."""

    ORPHANED_CLIENT = "orphaned_client"
    POD_GONE = "pod_gone"
    STUCK_EXIT = "stuck_exit"
    CTX_GROWTH = "ctx_growth"
    FD_GROWTH = "fd_growth"
    MEMORY_HELD = "memory_held_no_process"
    FOREIGN_PROCESS = "foreign_process"
    IDLE = "allocated_idle"
    MANY_CONTEXTS = "many_contexts"


class InvolvedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that a finding names."""

    pid: int
    start_ticks: int
    comm: str
    owner: Owner
    pod: str | None = None
    """``namespace/name``, or the UID where the name is not known."""
    state: str
    killable: bool
    """False: no signal reaches it (state D), or it ended already."""
    contexts: int | None = None
    used_bytes: int | None = None
    """Of the GPU's memory; None: NVML does not report it."""
    since_ns: int
    """When the finding's cause began, as far as it was seen."""
    role: Literal["holder", "owner"] = "holder"
    """owner: it made the orphans and is gone."""


class Details(msgspec.Struct, frozen=True):
    """What a finding on the use of a GPU rests on."""

    kind: LeakKind
    involved: tuple[InvolvedProcess, ...] = msgspec.field(default=(), name="culprits")
    """By pid; at most MAX_INVOLVED."""
    more: int = 0
    """Further ones."""
    contexts: int | None = None
    used_bytes: int | None = None
    """Of all involved processes; of memory that no process has, how much. None where a figure is missing."""
    incomplete: bool = False
    """Events had been lost or processes could not be seen when this was found."""
    certainty: Certainty = "verified"
    critical: bool = False
    """It grew for long, or far."""


MAX_INVOLVED = 16


class ConditionKey(NamedTuple):
    """What makes two reports the same condition; clearing one never clears another."""

    source: SourceName
    reason: Reason
    placement: Placement
    code: int
    """XID, NVML return code or place among the kinds of leak; 0 where the reason has none."""


class Condition(msgspec.Struct, frozen=True):
    """One active reason on one place, with its own recovery."""

    key: ConditionKey
    evidence: Evidence
    recovery: Recovery
    flips: bool
    """Whether devices at this place are Unhealthy while it lasts."""
    message: str
    since_ns: int
    last_ns: int
    """When it was last reported."""
    count: int = 1
    clean_probes: int = 0
    """Probes passed in a row since the last report and, for RESET, since the reset evidence."""
    clean_since_ns: int = 0
    """When the first of them passed; quiet time counts from here."""
    reset_seen: bool = False
    lasts: bool = False
    """The cause is still seen (a reading, a node missing, a hang, a hold), so probes cure nothing yet."""
    details: Details | None = None
    """Of a finding on the use of a GPU: the processes and amounts. It names pods, so no log line shows it."""

    @property
    def reason(self) -> Reason:
        """The reason code."""
        return self.key.reason

    @property
    def placement(self) -> Placement:
        """What it is attached to."""
        return self.key.placement
