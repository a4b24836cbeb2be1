"""What a benchmark measures, its target, and how it is shown.

Invariants: a figure is measured or it is missing; there is no default. A measurement that could not be
made raises, and the others go on. What a figure includes is in the docstring of its measurement.
"""

import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

NS_PER_MS: Final = 1_000_000


class MeasurementError(Exception):
    """A figure could not be measured; a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Absent:
    """One figure that cannot be measured on this machine, while others of its kind can."""

    name: str
    why: str
    """A sentence."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value beside what was promised."""

    name: str
    """``S1.p50``: the promise, and what of it."""
    value: float
    unit: str
    target: float | None
    """None: it is there to compare others with."""
    at_least: bool = False
    """Whether more is better."""
    yardstick: float | None = None
    """The same figure of the yardstick, measured in turn; then ``target`` is of the ratio to it."""

    @property
    def ratio(self) -> float | None:
        """How many times the yardstick's figure it is."""
        return self.value / self.yardstick if self.yardstick else None

    @property
    def verdict(self) -> str:
        """``kept`` or ``missed``; ``-`` for a figure without a target."""
        if self.target is None:
            return "-"
        value = self.value if self.ratio is None else self.ratio
        kept = value >= self.target if self.at_least else value <= self.target
        return "kept" if kept else "missed"


class Effort(Enum):
    """How many trials to make."""

    QUICK = "quick"
    USUAL = "usual"
    FULL = "full"

    def of(self, *, quick: int, usual: int, full: int | None = None) -> int:
        """Return the number for this effort; without one for FULL it is the usual one."""
        match self:
            case Effort.QUICK:
                return quick
            case Effort.USUAL:
                return usual
            case Effort.FULL:
                return usual if full is None else full


@dataclass(frozen=True, slots=True)
class Measurement:
    """One promise: its number and what measures it."""

    name: str
    """``S1``, as the list of promises numbers it."""
    about: str
    measure: Callable[[Effort], AsyncGenerator[Figure | Absent, None]]

    @property
    def method(self) -> str:
        """How it is measured: the docstring of what measures it, in one paragraph."""
        return " ".join((self.measure.__doc__ or "").split())


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least this fraction of the values is not above (nearest rank)."""
    if not values:
        raise MeasurementError("there was no trial")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def median_and_tail(
    name: str, values_ns: Sequence[float], *, p50_ms: float, p99_ms: float
) -> tuple[Figure, Figure]:
    """Return the median and the 99th percentile of durations beside their targets in milliseconds."""
    return (
        Figure(f"{name}.p50", quantile(values_ns, 0.5) / NS_PER_MS, "ms", p50_ms),
        Figure(f"{name}.p99", quantile(values_ns, 0.99) / NS_PER_MS, "ms", p99_ms),
    )


def beside_yardstick(
    name: str, ours_ns: Sequence[float], yardstick_ns: Sequence[float], *, p50: float, p99: float
) -> Iterator[Figure]:
    """Yield the median and the 99th percentile of durations; the targets are ratios to the yardstick's."""
    for part, fraction, target in (("p50", 0.5, p50), ("p99", 0.99, p99)):
        yield Figure(
            f"{name}.{part}",
            quantile(ours_ns, fraction) / NS_PER_MS,
            "ms",
            target,
            yardstick=quantile(yardstick_ns, fraction) / NS_PER_MS,
        )


_NAME_WIDTH: Final = 48
_NUMBER_WIDTH: Final = 10
_UNIT_WIDTH: Final = 7


def as_text(figure: Figure) -> str:
    """Return ``name value unit yardstick ratio target kept|missed`` in columns."""
    numbers = (figure.yardstick, figure.ratio, figure.target)
    columns = "".join(f"{'-' if each is None else _number(each):>{_NUMBER_WIDTH}}" for each in numbers)
    return (
        f"{figure.name:<{_NAME_WIDTH}}{_number(figure.value):>{_NUMBER_WIDTH}} {figure.unit:<{_UNIT_WIDTH}}"
        f"{columns}  {figure.verdict}"
    )


def as_json(figure: Figure, measurement: Measurement) -> str:
    """Return one JSON line, with how the figure was measured."""
    return json.dumps(
        {
            "name": figure.name,
            "value": round(figure.value, 4),
            "unit": figure.unit,
            "yardstick": figure.yardstick and round(figure.yardstick, 4),
            "ratio": figure.ratio and round(figure.ratio, 3),
            "target": figure.target,
            "verdict": figure.verdict,
            "method": measurement.method,
        }
    )


def _number(value: float) -> str:
    """Return a number as people write it: no more digits than are significant."""
    if value == int(value):
        return f"{int(value)}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3f}"
