"""What the operator decided: the part of the configuration that the core obeys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

MigStrategy = Literal["none", "single", "mixed"]

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings of the core. Defaults are the product's; scenarios and tests set shorter times."""

    mig_strategy: MigStrategy = "none"
    replicas: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Shares of each device, by resource name; absent means not shared."""
    extra_ignored_xids: frozenset[int] = frozenset()
    """XIDs that never flip, beside those that NVIDIA's plugin ignores."""
    pass_device_specs: bool = False
    device_root: str = "/"
    """Where /dev/nvidia* are on the host, put before every host path of a device spec."""
    recovery_clean_probes: int = 3
    recovery_quiet_ns: int = 60 * SECOND_NS
    first_probe_wait_ns: int = 150 * MILLISECOND_NS
    """How long registration waits for the first probe of each GPU."""
    watch_timeout_ns: int = 10 * SECOND_NS
    """A registration after which the kubelet opened no ListAndWatch for so long is made anew."""
    jitter_seed: int = 0
    """Spreads retries of many nodes; the core has no random numbers of its own."""
