"""What each reason code means: one table as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.model.health import Evidence, Reason, Recovery, Severity


@dataclass(frozen=True, slots=True)
class Meaning:
    """A row of the table."""

    severity: Severity
    evidence: Evidence
    recovery: Recovery
    advice: str
    """The next step, for the person who reads the reason."""


_HARD, _SOFT = Evidence.HARD, Evidence.SOFT
_CLEARS, _RESET = Recovery.SELF_CLEARING, Recovery.RESET
_CRITICAL, _WARNING = Severity.CRITICAL, Severity.WARNING

MEANINGS: Final[Mapping[Reason, Meaning]] = {
    Reason.XID: Meaning(_CRITICAL, _HARD, _RESET, "look the XID up in NVIDIA's catalog; reset the GPU"),
    Reason.GPU_LOST: Meaning(_CRITICAL, _HARD, _RESET, "reset the GPU or reboot the node"),
    Reason.RESET_REQUIRED: Meaning(_CRITICAL, _HARD, _RESET, "drain the GPU, then nvidia-smi --gpu-reset"),
    Reason.NVML_ERROR: Meaning(_CRITICAL, _HARD, _CLEARS, "read the kernel log (dmesg) for NVRM lines"),
    Reason.NVML_TIMEOUT: Meaning(_CRITICAL, _HARD, _CLEARS, "read the kernel log (dmesg) for NVRM lines"),
    Reason.DRIVER_HUNG: Meaning(_CRITICAL, _HARD, _CLEARS, "drain the node and reboot it"),
    Reason.DRIVER_NOT_LOADED: Meaning(_CRITICAL, _HARD, _CLEARS, "install or load the NVIDIA driver"),
    Reason.NVML_VERSION_MISMATCH: Meaning(
        _CRITICAL, _HARD, _CLEARS, "reload the kernel module or reboot, so that both versions match"
    ),
    Reason.KUBELET_UNAVAILABLE: Meaning(_WARNING, _HARD, _CLEARS, "start the kubelet"),
    Reason.REGISTRATION_REFUSED: Meaning(_WARNING, _HARD, _CLEARS, "read the kubelet's answer"),
    Reason.SOCKET_IN_USE: Meaning(_WARNING, _HARD, _CLEARS, "stop the other device plugin on this node"),
    Reason.SOURCE_FAILED: Meaning(_WARNING, _HARD, _CLEARS, "read the agent's log"),
    Reason.MIG_SINGLE_NOT_UNIFORM: Meaning(
        _CRITICAL, _HARD, _CLEARS, "give every GPU the same MIG profile, or use --mig-strategy=mixed"
    ),
    Reason.NOT_PROBED: Meaning(_WARNING, _SOFT, _CLEARS, "wait for the first health poll"),
    Reason.NOT_ENOUGH_GPUS: Meaning(_WARNING, _HARD, _CLEARS, "check the node's GPUs (lspci -d 10de:)"),
}
