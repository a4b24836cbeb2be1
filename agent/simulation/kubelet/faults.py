"""The faults of the emulated kubelet by name, and the checks of what a user or scenario asks for.

One frozen record for each fault: its fields are the parameters, their types the checks, its docstring the
help text. Durations are seconds, as numbers or as text with a unit (``2s``, ``500ms``, ``1m``).
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Final, Literal, NewType, TypeAlias, get_args, get_type_hints

from agent.core.wording import listed
from agent.errors import UsageError

Seconds = NewType("Seconds", float)
Down = Literal["graceful", "kill"]
"""Whether a kubelet that goes ends its calls or loses its connections; kubelet.sock stays either way."""


@dataclass(frozen=True, slots=True)
class RejectRegistrations:
    """Answer Register with an error, ``times`` times or until cleared."""

    message: str = "registration rejected by the simulated kubelet"
    times: int | None = None


@dataclass(frozen=True, slots=True)
class Delay:
    """Answer Register late, or dial the plugin back late, ``times`` times or until cleared."""

    register: Seconds = Seconds(0.0)
    dial: Seconds = Seconds(0.0)
    times: int | None = None


@dataclass(frozen=True, slots=True)
class DropStream:
    """End ListAndWatch of one or all resources: cancel it (RST_STREAM), or lose the connection."""

    resource: str | None = None
    how: Literal["cancel", "connection"] = "cancel"


@dataclass(frozen=True, slots=True)
class StopReading:
    """Stop reading ListAndWatch of one or all resources, for a time or until cleared."""

    resource: str | None = None
    duration: Seconds | None = None


@dataclass(frozen=True, slots=True)
class DeleteSockets:
    """Delete the plugins' socket files, or just one, while the kubelet lives on."""

    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart: streams dropped, every socket in the folder deleted, a new kubelet.sock.

    ``refusing`` is how long the new kubelet.sock refuses connections after it appeared.
    """

    downtime: Seconds = Seconds(0.0)
    how: Down = "graceful"
    refusing: Seconds = Seconds(0.0)


@dataclass(frozen=True, slots=True)
class Race:
    """A second registration of a resource overtakes the end of the first stream, and loses the resource.

    ``second``: now, by a second connection to the same endpoint. ``late-end``: the kubelet notices the
    end of the present stream only after the next registration.
    """

    resource: str | None = None
    how: Literal["second", "late-end"] = "second"


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget the plugin of one or all resources, and leave its ListAndWatch stream open."""

    resource: str | None = None


@dataclass(frozen=True, slots=True)
class MessageLimit:
    """Lower the limit on a ListAndWatch message to ``limit`` bytes; over it the stream ends."""

    limit: int


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """Accept only another version of the device plugin API."""

    version: str = "v1beta2"


@dataclass(frozen=True, slots=True)
class Absent:
    """Be down for a time, or until cleared."""

    duration: Seconds | None = None
    how: Down = "graceful"


@dataclass(frozen=True, slots=True)
class Clear:
    """End one lasting fault, or all of them."""

    fault: str | None = None


Fault: TypeAlias = (
    RejectRegistrations
    | Delay
    | DropStream
    | StopReading
    | DeleteSockets
    | Restart
    | Race
    | Forget
    | MessageLimit
    | OtherVersion
    | Absent
    | Clear
)

FAULTS: Final[Mapping[str, type[Fault]]] = {
    "refuse": RejectRegistrations,
    "delay": Delay,
    "drop_stream": DropStream,
    "stop_reading": StopReading,
    "delete_sockets": DeleteSockets,
    "restart": Restart,
    "race": Race,
    "forget": Forget,
    "message_limit": MessageLimit,
    "other_version": OtherVersion,
    "absent": Absent,
    "clear": Clear,
}
"""Every fault by its name; ``-`` and ``_`` are the same."""

LASTING: Final = ("refuse", "delay", "stop_reading", "race", "message_limit", "other_version", "absent")
"""Faults that ``clear`` can end."""

_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|)")
_MAX_SECONDS: Final = 86_400.0
_MAX_COUNT: Final = 2**31 - 1


def parse_fault(name: str, params: Mapping[str, object]) -> Fault:
    """Return the fault; raises UsageError that names what is known where something is not."""
    known = name.replace("-", "_")
    if known not in FAULTS:
        raise UsageError(
            f'There is no kubelet fault "{name[:80]}"; known faults: {", ".join(map(_written, FAULTS))}'
        )
    fault, called = FAULTS[known], f"kubelet {_written(known)}"
    hints = get_type_hints(fault)
    unknown = sorted(set(params) - set(hints))
    if unknown:
        raise UsageError(
            f'{called} has no parameter "{unknown[0][:80]}"; it accepts: {", ".join(hints) or "none"}'
        )
    missing = [each.name for each in fields(fault) if each.default is MISSING and each.name not in params]
    if missing:
        raise UsageError(f"{called} needs {missing[0]}")
    values = {key: _value(f"{key} of {called}", hints[key], value) for key, value in params.items()}
    parsed: Fault = fault(**values)  # type: ignore[arg-type]  # checked by name and type just above
    if isinstance(parsed, Clear) and parsed.fault is not None:
        return Clear(_lasting(parsed.fault))
    return parsed


def _written(name: str) -> str:
    """Return a fault's name as it is written on the command line and in scenarios."""
    return name.replace("_", "-")


def _lasting(name: str) -> str:
    known = name.replace("-", "_")
    if known not in LASTING:
        lasting = ", ".join(map(_written, LASTING))
        raise UsageError(f'Kubelet fault "{name[:80]}" cannot be cleared; those that last: {lasting}')
    return known


def _value(where: str, hint: object, value: object) -> object:
    """Return the value as the parameter's type; None is accepted where the type allows it."""
    options = get_args(hint)
    if type(None) in options:
        if value is None:
            return None
        hint = next(option for option in options if option is not type(None))
    if hint is Seconds:
        return _seconds(where, value)
    if hint is int:
        return _count(where, value)
    if hint is str:
        if not isinstance(value, str) or not value:
            raise UsageError(f'{where} must be a text, not "{value}"')
        return value
    choices = get_args(hint)
    if value not in choices:
        raise UsageError(f'{where} must be {listed(choices, "or")}, not "{value}"')
    return value


def _count(where: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= _MAX_COUNT:
        raise UsageError(f'{where} must be a whole number between 1 and {_MAX_COUNT}, not "{value}"')
    return number


def _seconds(where: str, value: object) -> Seconds:
    seconds: float | None = None
    if isinstance(value, str):
        matched = _DURATION.fullmatch(value.strip())
        seconds = float(matched[1]) * _UNITS[matched[2]] if matched else None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    if seconds is None or not 0 <= seconds <= _MAX_SECONDS:
        raise UsageError(f'{where} must be a duration like 2s or 500ms, not "{value}"')
    return Seconds(seconds)
