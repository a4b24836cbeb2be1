"""The agent as users run it, in which one part can be made to end, raise or hang; for ``agent_process``.

``python -m tests.faults.injected_agent DIRECTORY PYTHON -m agent run FLAGS``. What can be broken comes from
the agent's own seam (agent.guard), whose names are appended to ``DIRECTORY/parts``. What is to break stands
in ``DIRECTORY/fault``, as ``kind|name|how``; ``DIRECTORY/injected`` appears when it does.
"""

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, cast

from agent import guard
from agent.commands import run as command

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
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, kind: guard.Kind, name: str, function: Callable[..., Any], /) -> Callable[..., Any]:
        part = name_of(kind, name)
        with self._lock:
            if part not in self._known:
                self._known.add(part)
                self._parts.write(f"{part}\n")
        if kind == "task":
            return lambda: self._task(part, function)
        return lambda *args, **kwargs: self._call(part, function, args, kwargs)

    def _how(self, part: str) -> str | None:
        """Return how a part is to fail now; what fails once or hangs does so once."""
        try:
            wanted, _, how = self._fault.read_text().rpartition("|")
        except FileNotFoundError:
            return None
        if wanted != part:
            return None
        with self._lock:
            if how != "raises always" and self._injected.exists():
                return None
            self._injected.touch()
        return how

    async def _task(self, part: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        how = self._how(part)
        running = asyncio.get_running_loop().create_task(run(), name=f"{part} in the seam")
        try:
            while how is None and not running.done():
                await asyncio.wait({running}, timeout=PERIOD_S)
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


def main() -> None:
    """Become the agent."""
    directory, arguments = Path(sys.argv[1]), sys.argv[sys.argv.index("run") + 1 :]
    command.run(arguments, seam=cast("guard.Seam", Injector(directory)))


if __name__ == "__main__":
    main()
