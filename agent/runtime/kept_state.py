"""The state that outlives an agent: read before it serves, written while it does."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.bus import Latest
from agent.log import fields
from agent.model.ids import ALL, Placement
from agent.model.snapshot import Durable, Snapshot
from agent.threads import in_daemon_thread

if TYPE_CHECKING:
    from agent.sinks.statefile import StateFile

_log = logging.getLogger(__name__)

MAX_TOLD: Final = 8
"""Conditions that are named in the log."""

KEPT_WITHIN_S: Final = 2.0
"""The longest that somebody waits to hear whether the state is in the file."""


class KeptState:
    """What the agent before us left, and the sink that keeps ours; imported where it is needed."""

    def __init__(
        self,
        path: str,
        latest: Latest[Snapshot],
        *,
        boot_id: str,
        period_ns: int,
        prove: Callable[[], object],
    ) -> None:
        self._path = path
        self._latest = latest
        self._boot_id = boot_id
        self._period_ns = period_ns
        self._prove = prove
        self._sink: StateFile | None = None
        self.restored: Durable | None = None
        """None: nothing was left, or nothing that can be used."""

    def read(self) -> None:
        """Read what the agent before us left; blocks."""
        if Path(self._path).exists():
            from agent.sinks.statefile import load  # noqa: PLC0415 - only where there is a file

            self.restored = load(self._path, boot_id=self._boot_id)
            self._tell_of_conditions()

    def _tell_of_conditions(self) -> None:
        """Say why devices are out from the first moment on: nothing happens to them that would be told."""
        kept = self.restored.conditions if self.restored is not None else ()
        told = [f"{_place(each.placement)}: {each.reason}: {each.message}" for each in kept if each.flips]
        if told:
            more = len(told) - MAX_TOLD
            _log.warning(
                "Devices are out as the agent before knew them",
                extra=fields(conditions=[*told[:MAX_TOLD], *([f"{more} more"] if more > 0 else [])]),
            )

    @property
    def was_released(self) -> bool:
        """Whether an operator had the driver let go of, for longer than the agent before us lived."""
        return self.restored is not None and self.restored.released_until_ns is not None

    @property
    def trouble(self) -> str | None:
        """Why it cannot be written; None: it can, or was not yet."""
        return None if self._sink is None else self._sink.trouble

    @property
    def failures(self) -> int:
        """Writes that failed since the start."""
        return 0 if self._sink is None else self._sink.failures

    async def run(self) -> None:
        """Keep the state for ever."""
        if self._sink is None:
            state_file = await in_daemon_thread("statefile-import", _import_state_file)
            self._sink = state_file(
                self._path, self._latest, boot_id=self._boot_id, period_ns=self._period_ns, prove=self._prove
            )
        await self._sink.run()

    async def why_not_kept(self) -> str | None:
        """Write the newest state now, and return why it is not in the file; None: it is."""
        if not await self.flush(KEPT_WITHIN_S):
            return f"the disk did not take it within {KEPT_WITHIN_S:g} s"
        return self.trouble

    async def flush(self, timeout_s: float) -> bool:
        """Write the newest state, but wait no longer than the timeout; returns whether it is written."""
        return self._sink is None or await self._sink.flush(timeout_s)


def _place(placement: Placement) -> str:
    instances = (("GI", placement.gi), ("CI", placement.ci))
    return " ".join((placement.gpu, *(f"{name} {number}" for name, number in instances if number != ALL)))


def _import_state_file() -> "type[StateFile]":
    from agent.sinks.statefile import StateFile  # noqa: PLC0415

    return StateFile
