"""An agent with one source more: a thread that puts facts into its inbox at a rate, from SIGUSR1 on.

Run as a program, ``python -m tests.bench.fact_load RATE FLAGS...``. All else is the agent as it is composed
for users; a source of this rate that needs no hardware does not exist in it yet.
"""

import asyncio
import os
import signal
import sys
import threading
import time

from agent import app, log
from agent.bus import Inbox
from agent.commands.run import SWITCH_S
from agent.config import flags
from agent.config.load import load as load_settings
from agent.config.options import OPTIONS
from agent.model.facts import Fact, GpuProbePassed, XidReported
from agent.model.ids import GpuUuid
from agent.runtime.bootstrap import Bootstrap, NodeLock

_PERIOD_S = 0.005
"""Facts come in batches, as a reader of a ring buffer finds them."""
_NOISE_XID = 31
"""Flips nothing, but is counted and recorded."""
_XID_EVERY = 101
"""One fact in so many is an XID; no multiple of the number of GPUs, so that it comes from all of them."""


def main() -> None:
    """Be an agent, and put facts into it from SIGUSR1 on."""
    sys.setswitchinterval(SWITCH_S)
    per_s = int(sys.argv[1])
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
    ended = threading.Event()
    begun = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: begun.set())

    def load() -> None:
        begun.wait()
        gpus = [view.gpu.uuid for view in agent._latest.value.gpus]
        _put(agent._inbox, gpus, per_s, ended)

    threading.Thread(target=load, name="bench-facts", daemon=True).start()
    status = asyncio.run(agent.run())
    ended.set()
    os._exit(status)


def _put(inbox: Inbox[Fact], gpus: list[GpuUuid], per_s: int, ended: threading.Event) -> None:
    """Put facts until the end: probes that passed, as in a routine day, and now and then an XID."""
    began_s, sent = time.monotonic(), 0
    while not ended.wait(_PERIOD_S):
        due = int((time.monotonic() - began_s) * per_s)
        for number in range(sent, due):
            gpu = gpus[number % len(gpus)]
            inbox.put(GpuProbePassed(gpu) if number % _XID_EVERY else XidReported(gpu, _NOISE_XID))
        sent = due


if __name__ == "__main__":
    main()
