"""What the agent counts since it began: each count is declared once, beside what it counts.

A class that counts has an attribute ``failures = Count("state_file_failures_total", "writes", "...")`` and
counts with ``self.failures += 1``. Each instance has its own number. The registry, COUNTS, has the sum over
all instances there were, which never falls; ``/debug/state`` shows it.

Invariants: a name is declared once. A label has the values that were declared, and OTHER. Any thread may
count.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self, overload

OTHER: Final = "other"
"""Stands for each value of a label that was not declared."""

COUNTS: Final[dict[str, "Count | CountBy"]] = {}
"""Every count, by its name."""

_lock: Final = threading.Lock()


class Declared:
    """What is known of a count but its number: name (with base unit), what it counts, and a sentence."""

    def __init__(self, name: str, unit: str, help: str) -> None:  # noqa: A002 - the field's word
        if name in COUNTS:
            raise ValueError(f"The count {name} is declared twice")
        self.name: Final = name
        self.unit: Final = unit
        self.help: Final = help


class Count(Declared):
    """The declaration of one number, as an attribute of the class that counts."""

    def __init__(self, name: str, unit: str, help: str) -> None:  # noqa: A002 - the field's word
        super().__init__(name, unit, help)
        self.total = 0
        """Over all instances."""
        COUNTS[name] = self

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> int: ...
    def __get__(self, owner: object | None, kind: type) -> Self | int:
        """Return the number of an instance."""
        return self if owner is None else vars(owner).get(self.name, 0)

    def __set__(self, owner: object, value: int) -> None:
        """Change the number of an instance; the total follows what is added."""
        numbers = vars(owner)
        with _lock:
            self.total += max(0, value - numbers.get(self.name, 0))
            numbers[self.name] = value


class CountBy(Declared):
    """The declaration of a number for each value of a closed label."""

    def __init__(self, name: str, unit: str, help: str, *, label: str, values: Iterable[str]) -> None:  # noqa: A002
        super().__init__(name, unit, help)
        self.label: Final = label
        self.totals: dict[str, int] = dict.fromkeys((*values, OTHER), 0)
        """Over all instances."""
        COUNTS[name] = self

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...
    @overload
    def __get__(self, owner: object, kind: type) -> "Numbers": ...
    def __get__(self, owner: object | None, kind: type) -> "Self | Numbers":
        """Return the numbers of an instance."""
        if owner is None:
            return self
        numbers: Numbers = vars(owner).setdefault(self.name, Numbers(self.totals))
        return numbers


class Numbers(dict[str, int]):
    """The numbers of one instance, by the value of the label."""

    def __init__(self, totals: dict[str, int]) -> None:
        super().__init__()
        self._totals = totals

    def __missing__(self, value: str) -> int:
        return 0

    def __setitem__(self, value: str, number: int) -> None:
        """Change the number of a value; the total follows what is added."""
        if value not in self._totals:
            value, number = OTHER, self[OTHER] + number
        with _lock:
            self._totals[value] += max(0, number - self[value])
            super().__setitem__(value, number)


def describe() -> Mapping[str, Any]:
    """Return every count by its name, as JSON: its unit, what it means, and the number or numbers."""
    return {name: _described(COUNTS[name]) for name in sorted(COUNTS)}


def _described(count: Count | CountBy) -> Mapping[str, Any]:
    known: dict[str, Any] = {"unit": count.unit, "help": count.help}
    if isinstance(count, Count):
        return {**known, "value": count.total}
    return {**known, "label": count.label, "values": dict(count.totals)}
