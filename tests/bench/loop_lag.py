"""An agent that notes for how long its event loop stood still.

Run as a program, ``python -m tests.bench.loop_lag FILE FLAGS...``. All else is the agent as it is composed
for users. A task sleeps a millisecond over and over; what it oversleeps, the loop was busy elsewhere.
SIGUSR1 begins anew, SIGUSR2 writes the longest time since then into the file, and the longest less what the
loop's thread waited for a CPU meanwhile, in nanoseconds.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from agent import app, log
from agent.commands.run import SWITCH_S
from agent.config import flags
from agent.config.load import load as load_settings
from agent.config.options import OPTIONS
from agent.runtime.bootstrap import Bootstrap, NodeLock
from tests.bench.waiting import times_of

_SLEEP_NS: Final = 1_000_000


class _Lag:
    """The longest time the loop stood still."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._longest_ns = self._with_cpu_ns = 0

    async def watch(self) -> None:
        """Measure without end."""
        while True:
            waited_ns, due_ns = times_of().waited_ns, time.monotonic_ns() + _SLEEP_NS
            await asyncio.sleep(_SLEEP_NS / 1e9)
            late_ns = time.monotonic_ns() - due_ns
            self._longest_ns = max(self._longest_ns, late_ns)
            self._with_cpu_ns = max(self._with_cpu_ns, late_ns - (times_of().waited_ns - waited_ns))

    def begin(self) -> None:
        """Forget what was."""
        self._longest_ns = self._with_cpu_ns = 0

    def write(self) -> None:
        """Write the longest time."""
        draft = self._file.with_suffix(".new")
        draft.write_text(f"{self._longest_ns} {self._with_cpu_ns}\n", encoding="ascii")
        draft.rename(self._file)


async def _run(agent: app.Agent, lag: _Lag) -> int:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lag.begin)
    loop.add_signal_handler(signal.SIGUSR2, lag.write)
    watching = loop.create_task(lag.watch(), name="bench-lag")
    try:
        return await agent.run()
    finally:
        watching.cancel()


def main() -> None:
    """Be an agent, and measure."""
    sys.setswitchinterval(SWITCH_S)
    lag = _Lag(Path(sys.argv[1]))
    values, _ = flags.parse(sys.argv[2:], OPTIONS.values())
    settings = load_settings(values, os.environ)
    lines = log.set_up(settings.log_format, settings.log_level)
    lock = NodeLock(settings.lock_path)
    assert lock.try_acquire()
    agent = app.Agent(
        Bootstrap(settings, lock, boot_id="bench"),
        lines=lines,
        reread=lambda: settings,
        environment=os.environ,
    )
    os._exit(asyncio.run(_run(agent, lag)))


if __name__ == "__main__":
    main()
