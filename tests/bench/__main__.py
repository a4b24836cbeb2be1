"""``make bench``: the figures we promise, beside their targets.

Before the figures of each measurement stands how it is made. Each figure is one line on standard output,
``name value unit yardstick ratio target kept|missed``, or with ``--json`` one JSON object. Where a figure of
the yardstick (tests/bench/yardstick.py) stands beside it, the target is of the ratio. At the end it prints
which missed their targets. Progress and what could not be measured go to standard error. A figure that missed
is a result, so the exit code is 0; it is 1 if something could not be measured, and 2 for a wrong call.

Figures are for a machine with two cores and nothing else to do.
"""

import argparse
import asyncio
import compileall
import contextlib
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from tests.bench import (
    allocation,
    footprint,
    health,
    life,
    lists,
    preferred,
    probe_price,
    probes,
    registration,
    reload,
    rules,
    throughput,
    use_stretches,
)
from tests.bench.figures import (
    Absent,
    Effort,
    Figure,
    Measurement,
    MeasurementError,
    as_json,
    as_text,
)
from tests.bench.node import ROOT

MEASUREMENTS: Final[tuple[Measurement, ...]] = (
    health.XID_TO_MESSAGE,
    registration.KUBELET_RESTART,
    registration.LOST_REGISTRATION,
    life.START,
    life.STOP,
    allocation.ALLOCATE,
    preferred.PREFERRED,
    lists.LISTS,
    reload.RELOAD,
    footprint.MEMORY,
    footprint.CPU,
    throughput.FACTS,
    rules.FALSE_FLIPS,
    life.RESTART,
    health.UNHEALTHY_DEVICES,
    rules.OTHER_SOURCES,
    rules.STORM,
    probe_price.PRICE,
    probes.PROBES,
    use_stretches.STRETCHES,
)


def main(arguments: Sequence[str] | None = None, measurements: Sequence[Measurement] = MEASUREMENTS) -> int:
    """Measure and print; returns the exit code."""
    given = _parser(measurements).parse_args(arguments)
    effort = Effort.FULL if given.full else Effort.QUICK if given.quick else Effort.USUAL
    # As the installation does; where Python may not write bytecode, the compiler would be measured.
    compileall.compile_dir(ROOT / "agent", quiet=2)
    chosen = [each for each in measurements if not given.only or each.name in given.only]
    try:
        return asyncio.run(_measure(chosen, effort, is_json=given.json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _log("interrupted")
        return 1


def _parser(measurements: Sequence[Measurement]) -> argparse.ArgumentParser:
    about = "\n".join(f"  {each.name:4} {each.about}" for each in measurements)
    known = [each.name for each in measurements]
    parser = argparse.ArgumentParser(
        prog="make bench ARGS='...'",
        description="Measure what is promised and print it beside its target.",
        epilog=f"figures:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument(
        "--only", metavar="S1,S6", type=partial(_names, known), default=(), help="measure only these"
    )
    trials = parser.add_mutually_exclusive_group()
    trials.add_argument("--quick", action="store_true", help="few trials: shows that it works, no more")
    trials.add_argument("--full", action="store_true", help="as many trials as are promised (an hour)")
    return parser


def _names(known: Sequence[str], text: str) -> tuple[str, ...]:
    names = tuple(part.strip().upper() for part in text.split(",") if part.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = f"there is no {', '.join(unknown)}" if unknown else "no figure is named"
        raise argparse.ArgumentTypeError(f"{wrong}; choose from {', '.join(known)}")
    return names


async def _measure(chosen: Sequence[Measurement], effort: Effort, *, is_json: bool) -> int:
    """Make one measurement after another; returns 1 if one of them could not be made."""
    _end_in_order_when_terminated()
    missing = 0
    compared: list[Figure] = []
    for measurement in chosen:
        began_s = time.monotonic()
        if not is_json:
            sys.stdout.write(_method_of(measurement))
        try:
            async with contextlib.aclosing(measurement.measure(effort)) as figures:
                async for figure in figures:
                    if isinstance(figure, Absent):
                        missing += 1
                        _log(f"{figure.name} could not be measured: {figure.why}")
                        continue
                    compared += [figure] if figure.target is not None else []
                    sys.stdout.write(f"{as_json(figure, measurement) if is_json else as_text(figure)}\n")
                    sys.stdout.flush()
        except Exception as error:  # noqa: BLE001 - it is named, and the others go on
            missing += 1
            _log(f"{measurement.name} could not be measured: {_reason(error)}")
        else:
            _log(f"{measurement.name} took {time.monotonic() - began_s:.0f} s")
    missed = [figure.name for figure in compared if figure.verdict == "missed"]
    _log(f"{len(missed)} of {len(compared)} targets were missed: {', '.join(missed) or 'none'}")
    return 1 if missing else 0


def _method_of(measurement: Measurement) -> str:
    text = f"{measurement.name}, {measurement.about}: {measurement.method}"
    return textwrap.fill(text, 110, initial_indent="# ", subsequent_indent="# ") + "\n"


def _reason(error: BaseException) -> str:
    """Return what went wrong first, of what may be a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, MeasurementError) else f"{type(error).__name__}: {error}"


def _log(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def _end_in_order_when_terminated() -> None:
    """Let SIGTERM end the agents under test too, as Ctrl-C does."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


if __name__ == "__main__":
    sys.exit(main())
