"""Samples the readings of one GPU in a health poll, as far as the GPU and its driver support them.

Invariants: everything here blocks and runs on the GPU's own thread, after the basic calls of the poll
passed. What is not supported is read once, and again only after NVML was initialised again. An error
of a reading is no finding: the reading is unknown this time. Only GPU_IS_LOST and RESET_REQUIRED count,
whichever call returns them; a GPU that is unhealthy in another way fails the basic calls, too.

Cost of a poll, beside its five or six basic calls: up to seven calls, which are the recovery action, ECC,
remapped rows and retired pages (a GPU has one of the two), clocks, and PCIe width and replays. Links and
fabric are read once in ``slow_ns``, after an XID, on request, and in each poll while they are unhealthy: a
call for each link, and one. The slowdown temperature and the full PCIe width are read once. Memory and
processes are four calls more, see memory. Measured on the simulated library, for an A100: 20 us for
the basic calls, 33 us for the readings, 47 us where the twelve links are among them (H100, eighteen links
and fabric: 57 us). A real driver takes longer for each call, which costs the loop nothing.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from agent.errors import NvmlCode, NvmlError
from agent.model.sample import GpuSample
from agent.model.structs import replace
from agent.model.usage import GpuMemory
from agent.sources.nvml.library import FINDINGS, Handle, Nvml
from agent.sources.nvml.memory import MemoryReader
from agent.sources.nvml.optional_calls import UNSUPPORTED_CODES, OptionalCalls
from agent.sources.nvml.readings import MAX_LINKS, Readings

FABRIC_NOT_SUPPORTED: Final = 0
FABRIC_COMPLETED: Final = 3


class Sampled(msgspec.Struct, frozen=True):
    """The readings of one poll, and the call that found the GPU lost or to be reset."""

    sample: GpuSample
    failure: NvmlError | None
    memory: GpuMemory | None = None
    """The processes that use its memory; None: unknown this time."""


class Sampler:
    """Samples one GPU from poll to poll."""

    def __init__(self, nvml: Nvml, *, slow_ns: int, clock: Callable[[], int]) -> None:
        """``slow_ns``: between two samples of what costs much and changes rarely."""
        self._readings = Readings(nvml)
        self._slow_ns = slow_ns
        self._clock = clock
        self._slow_due_ns = 0
        self._ask = OptionalCalls()
        self._memory = MemoryReader(self._readings, self._ask)
        self._links = Links(self._readings)
        self._slowdown_celsius: int | None = None
        self._pcie_width_max: int | None = None
        self._links_read: tuple[int | None, tuple[int, ...]] = (None, ())
        self._fabric_read: tuple[int, int] | None = None

    def sample(
        self, handle: Handle, *, celsius: int | None, total_bytes: int | None, urgent: bool
    ) -> Sampled:
        """Sample every reading; the basic calls read ``celsius``; ``urgent`` includes the slow ones."""
        if urgent:
            self._slow_due_ns = 0
        sample = GpuSample(temperature_celsius=celsius)
        for read in (
            self._with_action,
            self._with_memory,
            self._with_clocks,
            self._with_pcie,
            self._with_slow,
        ):
            try:
                sample = read(handle, sample)
            except NvmlError as error:
                return Sampled(sample, error)
        try:
            return Sampled(sample, None, self._memory.read(handle, total_bytes=total_bytes))
        except NvmlError as error:
            return Sampled(sample, error)

    def sample_recovery_action(self, handle: Handle) -> GpuSample | None:
        """Read only the recovery action, of a GPU whose basic calls failed.

        Raises NvmlError for a finding, which is more precise than the failure that led here.
        """
        sample = self._with_action(handle, GpuSample())
        return sample if sample.recovery_action is not None else None

    def _with_action(self, handle: Handle, sample: GpuSample) -> GpuSample:
        return replace(sample, recovery_action=self._ask(handle, self._readings.recovery_action))

    def _with_memory(self, handle: Handle, sample: GpuSample) -> GpuSample:
        rows = self._ask(handle, self._readings.remapped_rows)
        return replace(
            sample,
            ecc_uncorrected=self._ask(handle, self._readings.ecc_uncorrected),
            rows_pending=None if rows is None else rows[0],
            rows_failed=None if rows is None else rows[1],
            pages_pending=self._ask(handle, self._readings.pages_pending),
        )

    def _with_clocks(self, handle: Handle, sample: GpuSample) -> GpuSample:
        if self._slowdown_celsius is None:
            self._slowdown_celsius = self._ask(handle, self._readings.slowdown_celsius)
        return replace(
            sample,
            hw_slowed=self._ask(handle, self._readings.hw_slowed, self._readings.hw_slowed_old),
            temperature_limit_celsius=self._slowdown_celsius,
        )

    def _with_pcie(self, handle: Handle, sample: GpuSample) -> GpuSample:
        if self._pcie_width_max is None:
            self._pcie_width_max = self._ask(handle, self._readings.pcie_width_max)
        return replace(
            sample,
            pcie_width=self._ask(handle, self._readings.pcie_width),
            pcie_width_max=self._pcie_width_max,
            pcie_replays=self._ask(handle, self._readings.pcie_replays),
        )

    def _with_slow(self, handle: Handle, sample: GpuSample) -> GpuSample:
        """Read links and fabric if that is due; in between, return the last values."""
        now_ns = self._clock()
        if now_ns >= self._slow_due_ns:
            self._links_read = self._links.read(handle)
            self._fabric_read = self._ask(handle, self._readings.fabric, self._readings.fabric_old)
            if self._slow_are_healthy():
                self._slow_due_ns = now_ns + self._slow_ns
        total, down = self._links_read
        state, status = self._fabric_read or (None, None)
        return replace(sample, links_total=total, links_down=down, fabric_state=state, fabric_status=status)

    def _slow_are_healthy(self) -> bool:
        """Whether nothing in links and fabric would keep the GPU unhealthy until the next slow sample."""
        _total, down = self._links_read
        state, status = self._fabric_read or (FABRIC_NOT_SUPPORTED, 0)
        return not down and (state == FABRIC_NOT_SUPPORTED or (state == FABRIC_COMPLETED and status == 0))


class Links:
    """Which NVLinks of a GPU count.

    A link counts once it was up since NVML was initialised, or where the driver names a peer at its
    other end: a bridge or a switch is there. The links of a card without a bridge are down by design.
    """

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._there = list(range(MAX_LINKS))
        self._connected: set[int] = set()
        self._unconnected: set[int] = set()

    def read(self, handle: Handle) -> tuple[int | None, tuple[int, ...]]:
        """Return how many links count and which of these are down; None: no links, or unknown this time.

        Raises NvmlError for a finding.
        """
        down: list[int] = []
        is_known = True
        for link in tuple(self._there):
            is_up = self._state(handle, link)
            if is_up is None:
                is_known &= link not in self._there
            elif is_up:
                self._connected.add(link)
            elif self._is_connected(handle, link):
                down.append(link)
        if not self._there or not is_known:
            return None, ()
        return len(self._connected & set(self._there)), tuple(down)

    def _state(self, handle: Handle, link: int) -> bool | None:
        if link not in self._there:
            return None
        try:
            return self._readings.link_is_up(handle, link)
        except NvmlError as error:
            if error.code in FINDINGS:
                raise
            if error.code in UNSUPPORTED_CODES:
                self._there.remove(link)
            elif error.code == NvmlCode.INVALID_ARGUMENT:
                # NVML knows more links than this GPU has.
                self._there = [one for one in self._there if one < link]
            return None

    def _is_connected(self, handle: Handle, link: int) -> bool:
        if link in self._connected or link in self._unconnected:
            return link in self._connected
        try:
            has_peer = self._readings.link_has_peer(handle, link)
        except NvmlError as error:
            if error.code in FINDINGS:
                raise
            if error.code not in (*UNSUPPORTED_CODES, NvmlCode.INVALID_ARGUMENT):
                return False
            has_peer = False
        (self._connected if has_peer else self._unconnected).add(link)
        return has_peer
