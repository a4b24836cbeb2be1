"""The agent as users run it, in which one part can be made to end, raise or hang; for ``agent_process``.

``python -m tests.faults.injected_agent DIRECTORY PYTHON -m agent run FLAGS``. What can be broken comes from
the agent's own seam (agent.guard), whose names are appended to ``DIRECTORY/parts``. What is to break stands
in ``DIRECTORY/fault``, as ``kind|name|how``; ``DIRECTORY/injected`` appears when it does. What
raises always or hangs does so until that file is removed. Which parts have to give proofs is appended to
``DIRECTORY/terms``, as ``part period_ns deadline_ns``; ``DIRECTORY/late`` has the nanoseconds by which the
agent's loop was late so far, as it is on a loaded machine.
"""

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, cast

from agent import guard
from agent.commands import run as command
from agent.core.freshness import Terms
from agent.model.ids import ComponentId
from agent.proofs import Proofs

PERIOD_S: Final = 0.02

FOREVER: Final = threading.Event()
"""Never set."""


class InjectedError(Exception):
    """What a broken part raises."""


def name_of(kind: str, name: str) -> str:
    """Return the name of a part, the same for each of many like it."""
    return f"{kind}|{re.sub(r'[0-9]+$', 'N', name)}"


class Injector:
    """The seam; one for the agent."""

    def __init__(self, directory: Path) -> None:
        self._fault = directory / "fault"
        self._injected = directory / "injected"
        self._parts = (directory / "parts").open("a", buffering=1)
        self._late = (directory / "late").open("wb", buffering=0)
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._watch: asyncio.Task[None] | None = None

    def __call__(self, kind: guard.Kind, name: str, function: Callable[..., Any], /) -> Callable[..., Any]:
        part = name_of(kind, name)
        with self._lock:
            if part not in self._known:
                self._known.add(part)
                self._parts.write(f"{part}\n")
        if kind == "task":
            return lambda: self._task(part, function)
        return lambda *args, **kwargs: self._call(part, function, args, kwargs)

    def _wanted(self) -> tuple[str, str] | None:
        """Return which part is to fail now, and how."""
        try:
            part, _, how = self._fault.read_text().rpartition("|")
        except FileNotFoundError:
            return None
        return part, how

    def _how(self, part: str) -> str | None:
        """Return how a part is to fail now."""
        wanted = self._wanted()
        if wanted is None or wanted[0] != part:
            return None
        how = wanted[1]
        with self._lock:
            if how in {"ends", "raises once"} and self._injected.exists():
                return None
            self._injected.touch()
        return how

    async def _watch_fault(self) -> None:
        """Wake the tasks of the part that is to fail, and write by how much this loop is late in all."""
        before, late_ns = None, 0
        while True:
            began_ns = time.monotonic_ns()
            await asyncio.sleep(PERIOD_S)
            late_ns += max(0, time.monotonic_ns() - began_ns - int(PERIOD_S * 1e9))
            os.pwrite(self._late.fileno(), f"{late_ns:020d}".encode(), 0)
            wanted = self._wanted()
            if wanted not in (None, before):
                for waiter in self._waiting.pop(wanted[0], ()):
                    if not waiter.done():
                        waiter.set_result(None)
            before = wanted

    async def _task(self, part: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        if self._watch is None:
            self._watch = loop.create_task(self._watch_fault(), name="watch for the fault")
        how = self._how(part)
        running = loop.create_task(run(), name=f"{part} in the seam")
        try:
            while how is None and not running.done():
                waiter = loop.create_future()
                self._waiting.setdefault(part, []).append(waiter)
                await asyncio.wait({running, waiter}, return_when=asyncio.FIRST_COMPLETED)
                how = self._how(part)
        finally:
            if how is not None or not running.done():
                running.cancel()
                await asyncio.wait({running})
        if how == "hangs":
            await asyncio.Event().wait()
        if how in {"raises once", "raises always"}:
            raise InjectedError(part)
        if how is None:
            await running

    def _call(self, part: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        how = self._how(part)
        if how in {"raises once", "raises always"}:
            raise InjectedError(part)
        if how == "hangs":
            FOREVER.wait()
        return None if how == "ends" else function(*args, **kwargs)


def write_terms(path: Path) -> None:
    """Append the terms of each part from now on."""
    expect = Proofs.expect

    def noting(proofs: Proofs, part: ComponentId, terms: Terms, *, start_ns: int = 0) -> None:
        with path.open("a") as file:
            file.write(f"{part.name} {terms.least_period_ns} {terms.deadline_ns}\n")
        expect(proofs, part, terms, start_ns=start_ns)

    Proofs.expect = noting  # type: ignore[assignment, method-assign]


def main() -> None:
    """Become the agent."""
    directory, arguments = Path(sys.argv[1]), sys.argv[sys.argv.index("run") + 1 :]
    write_terms(directory / "terms")
    command.run(arguments, seam=cast("guard.Seam", Injector(directory)))


if __name__ == "__main__":
    main()
