"""Health polls with their readings, as facts."""

from collections.abc import Mapping
from typing import Any, Final

from agent.model.facts import Fact, GpuSampled
from agent.model.health import Reason
from agent.model.ids import GpuUuid
from agent.model.sample import GpuSample
from agent.model.structs import replace
from tests.core.build import U0, Node, passed

HEALTHY: Final = GpuSample(
    recovery_action=0,
    ecc_uncorrected=0,
    rows_pending=False,
    rows_failed=False,
    pages_pending=False,
    hw_slowed=False,
    temperature_celsius=40,
    temperature_limit_celsius=90,
    links_total=18,
    links_down=(),
    pcie_width=16,
    pcie_width_max=16,
    pcie_replays=0,
    fabric_state=3,
    fabric_status=0,
)
"""Every reading is supported, and each is healthy."""

NOTHING: Final = GpuSample()
"""No reading is supported, or none could be read."""

BAD: Final[Mapping[Reason, Mapping[str, Any]]] = {
    Reason.RECOVERY_ACTION: {"recovery_action": 1},
    Reason.IMEX_DOMAIN_DOWN: {"recovery_action": 5},
    Reason.ROW_REMAP_FAILED: {"rows_failed": True},
    Reason.ROW_REMAP_PENDING: {"rows_pending": True},
    Reason.ECC_UNCORRECTED: {"ecc_uncorrected": 2},
    Reason.NVLINK_DOWN: {"links_down": (3, 7)},
    Reason.THERMAL: {"temperature_celsius": 90},
    Reason.PCIE_DEGRADED: {"pcie_width": 8},
    Reason.FABRIC_NOT_READY: {"fabric_state": 2},
    Reason.FABRIC_FAILED: {"fabric_status": 999},
}
"""One reading for each reason that raises it."""


def sample(**readings: Any) -> GpuSample:
    """A healthy sample but for these readings."""
    return replace(HEALTHY, **readings)


def bad(reason: Reason) -> GpuSample:
    """A healthy sample but for the reading that raises a reason."""
    return sample(**BAD[reason])


def read(on: GpuUuid = U0, **readings: Any) -> GpuSampled:
    """What a poll read: healthy but for these readings."""
    return GpuSampled(on, sample(**readings))


def poll(on: GpuUuid = U0, **readings: Any) -> tuple[Fact, Fact]:
    """A whole poll whose calls all succeeded."""
    return read(on, **readings), passed(on)


def blind_poll(on: GpuUuid = U0) -> tuple[Fact, Fact]:
    """A poll that passed and read nothing."""
    return GpuSampled(on, NOTHING), passed(on)


def reasons(node: Node, on: GpuUuid = U0) -> set[Reason]:
    """The active reasons on a GPU."""
    return {item.reason for item in node.conditions() if item.placement.gpu == on}
