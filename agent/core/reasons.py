"""What is known of each reason code: one table as data, from which the documentation is made."""

from collections.abc import Mapping
from typing import Final

import msgspec

from agent.core.xids import advice_of as advice_of_xid
from agent.model.health import Condition, Evidence, Reason, Recovery, Severity


class ReasonSpec(msgspec.Struct, frozen=True):
    """A row of the table."""

    severity: Severity
    evidence: Evidence
    recovery: Recovery
    summary: str
    """What was found, in one line."""
    advice: str
    """The operator's next step."""
    counts_for_flapping: bool = True
    """False: it takes a GPU out without being a fault of that GPU."""
    follows_its_cause: bool = False
    """Whether its conditions last as long as their cause, and then need nothing but clean probes."""
    confirms_log_line: bool = False
    """Whether it confirms a kernel-log line on any XID that more than the application has to act on."""

    @property
    def flips(self) -> bool:
        """Whether it makes devices Unhealthy: critical, and reported by the device itself."""
        return self.severity is Severity.CRITICAL and self.evidence is Evidence.HARD


NO_PERMISSION: Final = 4
"""NVML's return code for a missing right. Source: nvml.h."""

_HARD, _SOFT = Evidence.HARD, Evidence.SOFT
_CLEARS, _RESET = Recovery.SELF_CLEARING, Recovery.RESET
_CRITICAL, _WARNING, _INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO
_READ_LOG = "read the kernel log (dmesg) for NVRM lines"
_DRAIN_AND_RESET = "drain the GPU, then reset it (nvidia-smi --gpu-reset) or reboot the node"

REASON_SPECS: Final[Mapping[Reason, ReasonSpec]] = {
    Reason.XID: ReasonSpec(
        _CRITICAL, _HARD, _RESET, "The driver reported an error of the GPU", _DRAIN_AND_RESET
    ),
    Reason.UNCONFIRMED: ReasonSpec(
        _WARNING,
        _SOFT,
        _CLEARS,
        "The kernel log reports an error that nothing else confirms",
        "see whether it repeats; run a diagnosis of the GPU (dcgmi diag -r 3) when it is free",
    ),
    Reason.GPU_LOST: ReasonSpec(
        _CRITICAL,
        _HARD,
        _RESET,
        "The GPU does not answer on the bus",
        "reset the GPU or reboot the node",
        confirms_log_line=True,
    ),
    Reason.RESET_REQUIRED: ReasonSpec(
        _CRITICAL,
        _HARD,
        _RESET,
        "The driver requires a reset of the GPU",
        _DRAIN_AND_RESET,
        confirms_log_line=True,
    ),
    Reason.RECOVERY_ACTION: ReasonSpec(
        _CRITICAL,
        _HARD,
        _RESET,
        "The driver names the step that recovers the GPU",
        "take that step",
        confirms_log_line=True,
    ),
    Reason.IMEX_DOMAIN_DOWN: ReasonSpec(
        _WARNING,
        _HARD,
        _CLEARS,
        "The driver asks to recover the IMEX domain, which is not about this GPU",
        "check nvidia-imex on every node of the domain",
    ),
    Reason.ECC_UNCORRECTED: ReasonSpec(
        _WARNING, _HARD, _RESET, "Memory errors that ECC could not correct", "reset the GPU when it is free"
    ),
    Reason.ROW_REMAP_FAILED: ReasonSpec(
        _CRITICAL, _HARD, Recovery.BY_HAND, "Memory could not be repaired", "have the GPU replaced (RMA)"
    ),
    Reason.ROW_REMAP_PENDING: ReasonSpec(
        _INFO, _HARD, _CLEARS, "Memory will be repaired at the next reset", "reset the GPU when it is free"
    ),
    Reason.NVLINK_DOWN: ReasonSpec(
        _WARNING, _SOFT, _CLEARS, "NVLinks are down", "reset the GPU when it is free; check the links"
    ),
    Reason.FABRIC_NOT_READY: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The NVSwitch fabric is not set up",
        "start nvidia-fabricmanager",
        counts_for_flapping=False,
    ),
    Reason.FABRIC_FAILED: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The NVSwitch fabric could not be set up",
        "check that nvidia-fabricmanager has the driver's version",
    ),
    Reason.THERMAL: ReasonSpec(
        _WARNING, _SOFT, _CLEARS, "The GPU is too hot or held down by hardware", "check cooling and power"
    ),
    Reason.PCIE_DEGRADED: ReasonSpec(
        _INFO, _HARD, _CLEARS, "The PCIe link is narrower than it can be", "reseat the card"
    ),
    Reason.NVML_ERROR: ReasonSpec(
        _CRITICAL, _HARD, _CLEARS, "A driver call failed", _READ_LOG, confirms_log_line=True
    ),
    Reason.NVML_TIMEOUT: ReasonSpec(
        _CRITICAL, _HARD, _CLEARS, "A driver call does not return", _READ_LOG, confirms_log_line=True
    ),
    Reason.DRIVER_HUNG: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The driver as a whole does not answer",
        "drain the node and reboot it",
        counts_for_flapping=False,
        follows_its_cause=True,
    ),
    Reason.UVM_FAILED: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The unified memory driver rejects every call, so no CUDA program starts",
        "drain the node and reboot it",
        counts_for_flapping=False,
    ),
    Reason.DRIVER_NOT_LOADED: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "NVML cannot be initialised",
        "install or load the NVIDIA driver",
        counts_for_flapping=False,
    ),
    Reason.NVML_VERSION_MISMATCH: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The driver's library and kernel module are of different versions",
        "reload the kernel module or reboot, so that both versions match",
        counts_for_flapping=False,
    ),
    Reason.DEVICE_NODE_MISSING: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "A device node does not exist",
        "run nvidia-modprobe -u -c 0 (or reboot)",
        counts_for_flapping=False,
        follows_its_cause=True,
    ),
    Reason.GPU_COUNT_MISMATCH: ReasonSpec(
        _WARNING, _HARD, _CLEARS, "NVML lists fewer GPUs than the bus has", _READ_LOG
    ),
    Reason.FLAPPING: ReasonSpec(
        _CRITICAL,
        _HARD,
        Recovery.REBOOT,
        "The GPU keeps failing and recovering",
        "find the cause, then gpu-agent recover",
    ),
    Reason.MAINTENANCE: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The driver was released on request",
        "wait, or gpu-agent resume",
        counts_for_flapping=False,
        follows_its_cause=True,
    ),
    Reason.HELD: ReasonSpec(
        _CRITICAL,
        _HARD,
        Recovery.BY_HAND,
        "An operator holds the GPU",
        "gpu-agent unhold",
        counts_for_flapping=False,
    ),
    Reason.KUBELET_UNAVAILABLE: ReasonSpec(
        _WARNING, _HARD, _CLEARS, "The kubelet cannot be reached", "start the kubelet"
    ),
    Reason.REGISTRATION_REFUSED: ReasonSpec(
        _WARNING, _HARD, _CLEARS, "The kubelet rejects the registration", "read the kubelet's answer"
    ),
    Reason.KUBELET_COUNT_MISMATCH: ReasonSpec(
        _WARNING,
        _HARD,
        _CLEARS,
        "The kubelet does not have the devices that it was sent",
        "read the kubelet's log; restart the kubelet if it lasts",
    ),
    Reason.SOCKET_IN_USE: ReasonSpec(
        _WARNING,
        _HARD,
        _CLEARS,
        "Something else has the plugin's socket",
        "stop the other device plugin on this node",
    ),
    Reason.SOURCE_FAILED: ReasonSpec(
        _WARNING, _HARD, _CLEARS, "A component of the agent does not run", "read the agent's log"
    ),
    Reason.MIG_SINGLE_NOT_UNIFORM: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "Strategy single needs one MIG profile on all GPUs",
        "give every GPU the same MIG profile, or use --mig-strategy=mixed",
    ),
    Reason.IMEX_CHANNEL_MISSING: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The node lacks an IMEX channel that every container is to get",
        "create /dev/nvidia-caps-imex-channels/channel0 (nvidia-modprobe -c 0) and start nvidia-imex",
        counts_for_flapping=False,
        follows_its_cause=True,
    ),
    Reason.MPS_NOT_READY: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "The MPS control daemon, which shares the GPU, does not serve",
        "start the MPS control daemon, or read its log",
        counts_for_flapping=False,
        follows_its_cause=True,
    ),
    Reason.MPS_REPLICAS_OVER_LIMIT: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "MPS cannot serve so many replicas of the GPU",
        "configure fewer replicas for this GPU model",
    ),
    Reason.LIST_TOO_LONG: ReasonSpec(
        _WARNING,
        _HARD,
        _CLEARS,
        "A resource has more devices than the kubelet takes in one message",
        "configure fewer replicas",
    ),
    Reason.CDI_UNRESOLVABLE: ReasonSpec(
        _CRITICAL,
        _HARD,
        _CLEARS,
        "No CDI specification file resolves an advertised device",
        "let the agent write --cdi-spec-dir, or remove the file that names its devices too",
        counts_for_flapping=False,
        follows_its_cause=True,
    ),
    Reason.STATE_LOST: ReasonSpec(
        _WARNING,
        _HARD,
        Recovery.BY_HAND,
        "The state that an earlier agent kept of the GPUs is lost",
        "hold the GPUs that were unhealthy before and must stay so, then gpu-agent recover --state",
    ),
    Reason.NOT_PROBED: ReasonSpec(
        _WARNING, _SOFT, _CLEARS, "The GPU was not probed yet", "wait for the first health poll"
    ),
    Reason.NOT_ENOUGH_GPUS: ReasonSpec(
        _WARNING, _HARD, _CLEARS, "The node has no GPU", "check the node's GPUs (lspci -d 10de:)"
    ),
    Reason.CONTEXT_LEAK: ReasonSpec(
        _WARNING,
        _SOFT,
        _CLEARS,
        "Processes hold contexts that they should have freed",
        "gpu-agent owners names the processes; stop them, or fix the leak",
        counts_for_flapping=False,
    ),
    Reason.MEMORY_HELD_NO_PROCESS: ReasonSpec(
        _WARNING,
        _SOFT,
        _CLEARS,
        "Memory of the GPU is used by no process",
        "reset the GPU when it is free; check for processes in other PID namespaces or virtual machines",
    ),
    Reason.FOREIGN_PROCESS: ReasonSpec(
        _WARNING,
        _SOFT,
        _CLEARS,
        "A process uses a GPU that is not allocated to it",
        "gpu-agent owners names it; stop it, or let its pod request the GPU",
    ),
    Reason.ALLOCATED_IDLE: ReasonSpec(
        _INFO,
        _SOFT,
        _CLEARS,
        "A pod has a device that no process has opened for long",
        "ask the pod's owner whether it is needed",
    ),
    Reason.MANY_CONTEXTS: ReasonSpec(
        _INFO,
        _SOFT,
        _CLEARS,
        "Very many contexts are on one GPU",
        "gpu-agent contexts names their processes; each context takes memory",
    ),
}


WAIT: Final = "nothing: its cause is over, and clean probes clear it"


def advice_of(condition: Condition) -> str:
    """Return the operator's next step for a condition."""
    spec = REASON_SPECS[condition.reason]
    if spec.follows_its_cause and not condition.lasts:
        return WAIT
    if condition.reason is Reason.XID:
        return advice_of_xid(condition.key.code)
    if condition.reason is Reason.NVML_ERROR and condition.key.code == NO_PERMISSION:
        return "give the agent access to /dev/nvidiactl and /dev/nvidia* (root, or a privileged container)"
    return spec.advice
