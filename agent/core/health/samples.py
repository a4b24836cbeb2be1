"""What the readings of a GPU mean: one rule for each reason, as data.

Invariants: a reading that is not advertised (None) raises nothing and clears nothing. A rule answers with
the message while its cause lasts, with None when the reading shows a healthy GPU, and with
UNKNOWN when there is no reading.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Final, Literal

import msgspec

from agent.model.health import Reason
from agent.model.policy import Policy
from agent.model.sample import GpuSample

RECOVER_IMEX_DOMAIN: Final = 5
"""The one recovery action that is not about the GPU itself."""
REBOOT_ACTIONS: Final = frozenset({2, 7})

RECOVERY_ACTIONS: Final[Mapping[int, str]] = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain P2P traffic",
    4: "drain the GPU and reset it",
    RECOVER_IMEX_DOMAIN: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}

FABRIC_NOT_SUPPORTED: Final = 0
FABRIC_COMPLETED: Final = 3
FABRIC_STATES: Final[Mapping[int, str]] = {1: "not started", 2: "in progress"}


class _Unknown(Enum):
    UNKNOWN = "unknown"


UNKNOWN: Final = _Unknown.UNKNOWN
Verdict = str | None | Literal[_Unknown.UNKNOWN]


class Window(msgspec.Struct, frozen=True):
    """Whether hardware held the clocks down, poll by poll; the oldest first."""

    slowed: tuple[bool, ...] = ()

    def with_reading(self, *, slowed: bool, length: int) -> "Window":
        """Return the window after one more poll."""
        return Window((*self.slowed, slowed)[-length:])

    @property
    def share_percent(self) -> int:
        """How much of the window the clocks were held down."""
        return 100 * sum(self.slowed) // len(self.slowed) if self.slowed else 0


Rule = Callable[[GpuSample, Window, Policy], Verdict]


def _recovery_action(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    action = sample.recovery_action
    if action is None or action == RECOVER_IMEX_DOMAIN:
        return UNKNOWN
    if action == 0:
        return None
    return f"The driver asks to {RECOVERY_ACTIONS.get(action, f'take recovery action {action}')}"


def _imex_domain_down(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    action = sample.recovery_action
    if action is None:
        return UNKNOWN
    return f"The driver asks to {RECOVERY_ACTIONS[action]}" if action == RECOVER_IMEX_DOMAIN else None


def _ecc_uncorrected(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    count = sample.ecc_uncorrected
    if count is None:
        return UNKNOWN
    return f"{count} uncorrected ECC errors since the driver was loaded" if count else None


def _rows_pending(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    if sample.rows_pending is None and sample.pages_pending is None:
        return UNKNOWN
    waits = sample.rows_pending or sample.pages_pending
    return "Memory is repaired at the next reset of the GPU" if waits else None


def _rows_failed(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    if sample.rows_failed is None:
        return UNKNOWN
    return "Memory could not be repaired: a row remapping failed" if sample.rows_failed else None


def _thermal(sample: GpuSample, window: Window, policy: Policy) -> Verdict:
    celsius, limit = sample.temperature_celsius, sample.temperature_limit_celsius
    if celsius is not None and limit is not None and celsius >= limit:
        return f"{celsius} C, the GPU slows down at {limit} C"
    if sample.hw_slowed is None:
        return UNKNOWN if celsius is None or limit is None else None
    if window.share_percent < policy.slowdown_share_percent:
        return None
    if len(window.slowed) < policy.slowdown_window_polls:
        # Too few polls to call it a lasting slowdown, and too many of them slow to call it over.
        return UNKNOWN
    return f"Hardware held the clocks down in {window.share_percent} % of the last polls"


def _links(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    if sample.links_total is None:
        return UNKNOWN
    if not sample.links_down:
        return None
    numbers = ", ".join(str(link) for link in sample.links_down)
    return f"{len(sample.links_down)} of {sample.links_total} NVLinks are down: {numbers}"


def _pcie(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    width, width_max = sample.pcie_width, sample.pcie_width_max
    if width is None or width_max is None:
        return UNKNOWN
    return f"The PCIe link is x{width} of x{width_max}" if width < width_max else None


def _fabric_not_ready(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    if sample.fabric_state is None:
        return UNKNOWN
    if sample.fabric_state in {FABRIC_NOT_SUPPORTED, FABRIC_COMPLETED}:
        return None
    state = FABRIC_STATES.get(sample.fabric_state, f"in state {sample.fabric_state}")
    return f"The NVSwitch fabric is {state}, so CUDA cannot start"


def _fabric_failed(sample: GpuSample, _window: Window, _policy: Policy) -> Verdict:
    if sample.fabric_state is None or sample.fabric_status is None:
        return UNKNOWN
    if sample.fabric_state != FABRIC_COMPLETED or sample.fabric_status == 0:
        return None
    return f"The NVSwitch fabric was set up with error {sample.fabric_status}, so CUDA cannot start"


RULES: Final[Mapping[Reason, Rule]] = {
    Reason.RECOVERY_ACTION: _recovery_action,
    Reason.IMEX_DOMAIN_DOWN: _imex_domain_down,
    Reason.ROW_REMAP_FAILED: _rows_failed,
    Reason.FABRIC_FAILED: _fabric_failed,
    Reason.FABRIC_NOT_READY: _fabric_not_ready,
    Reason.ECC_UNCORRECTED: _ecc_uncorrected,
    Reason.NVLINK_DOWN: _links,
    Reason.THERMAL: _thermal,
    Reason.ROW_REMAP_PENDING: _rows_pending,
    Reason.PCIE_DEGRADED: _pcie,
}


def evaluate(sample: GpuSample, window: Window, policy: Policy) -> Mapping[Reason, Verdict]:
    """Return the verdict of every rule on one sample."""
    return {reason: rule(sample, window, policy) for reason, rule in RULES.items()}
