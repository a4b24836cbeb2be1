"""Events as sentences for people: the object and the reason in one line, since a log shows no fields.

Invariants: every event has a sentence; for an unknown kind it is the message, with the GPU before and the
details behind it. The caller that prints a sentence escapes it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from agent.core.wording import counted

Fields = Mapping[str, Any]

MAX_NAMED: Final = 2
"""GPUs that a sentence names; for more it has their number."""


def sentence_of(message: str, fields: Fields | None) -> str:
    """Return the sentence on an event with this message and these fields."""
    values = fields or {}
    make = _SENTENCES.get(message)
    try:
        return _in_general(message, values) if make is None else make(values)
    except (KeyError, TypeError, AttributeError):
        # From the event log of another version.
        return _in_general(message, values)


def gpu_name(fields: Fields) -> str:
    """Return the GPU of the fields: ``GPU 3 (0000:3b:00.0)``, with its MIG instances; empty: of none."""
    where = fields.get("pci") or fields.get("uuid")
    if fields.get("gpu") is None:
        name = f"The GPU {where}" if where else ""
    else:
        name = f"GPU {fields['gpu']}" + (f" ({where})" if where else "")
    if not name or fields.get("gi") is None:
        return name
    return f"{name} GI {fields['gi']} CI {fields['ci']}"


def reason_name(fields: Fields) -> str:
    """Return a reason code with the number of an XID: ``xid 79``."""
    return f"{fields['reason']} {fields['code']}" if fields.get("code") else str(fields["reason"])


def _in_general(message: str, fields: Fields) -> str:
    subject = gpu_name(fields)
    text = message
    if fields.get("xid") is not None:
        text = f"{text}: XID {fields['xid']}" + (
            f", {fields['count']} times" if fields.get("count", 1) > 1 else ""
        )
    for key in ("detail", "message"):
        if fields.get(key):
            text = f"{text}: {fields[key]}"
    if isinstance(fields.get("gpus"), list | tuple):
        text = f"{text}: {_listed(fields['gpus'])}"
    return f"{subject}: {text}" if subject else text


def _listed(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))


def _cause(fields: Fields, text: object) -> str:
    """Return a reason with its message; that of an XID has the number itself."""
    return str(text) if str(text).startswith("XID") else f"{reason_name(fields)}, {text}"


def _health(fields: Fields, verb: str) -> str:
    name = f"{gpu_name(fields)} {verb} {str(fields['health']).lower()}"
    if fields.get("detail"):
        name = f"{name}: {_cause(fields, fields['detail'])}"
    return f"{name} ({counted(fields['count'], 'device')} of {fields['resource']})"


def _gpus(fields: Fields) -> str:
    text = f"NVML lists {counted(fields['count'], 'GPU')} now"
    for word in ("added", "gone"):
        if fields.get(word):
            named = fields[word] if len(fields[word]) <= MAX_NAMED else [str(len(fields[word]))]
            text = f"{text}; {word}: {_listed(named)}"
    return text


def _allocatable(fields: Fields) -> str:
    number = counted(fields["capacity"], "device")
    text = f"{fields['resource']}: {fields['allocatable']} of {number} allocatable"
    why = dict.fromkeys(
        f"GPU {each['gpu']} {each['reason']}" for each in fields["unhealthy"] if "reason" in each
    )
    return f"{text}; unhealthy: {_listed(why)}" if why else text


_SENTENCES: Final[Mapping[str, Callable[[Fields], str]]] = {
    "NVML was initialised": lambda fields: (
        f"NVML was initialised: driver {fields['driver_version']}, NVML {fields['nvml_version']}"
    ),
    "NVML is not available": lambda fields: f"NVML is not available: {fields['reason']}, {fields['detail']}",
    "NVML lists other GPUs": _gpus,
    "A condition was raised": lambda fields: (
        f"{gpu_name(fields)} has the condition {_cause(fields, fields['message'])}; {fields['advice']}"
    ),
    "A condition was cleared": lambda fields: f"{gpu_name(fields)} has {reason_name(fields)} no more",
    "Health changed": lambda fields: _health(fields, "is"),
    "Health would have changed": lambda fields: _health(fields, "would be"),
    "Allocatable changed": _allocatable,
    "Registered with the kubelet": lambda fields: f"{fields['resource']} is registered with the kubelet",
    "Not registered with the kubelet": lambda fields: (
        f"{fields['resource']} is not registered with the kubelet: {fields['detail']}"
    ),
    "A GPU is held": lambda fields: f"The GPU {fields['selector']} is held: {fields['why']}",
    "A GPU is held no more": lambda fields: f"The GPU {fields['selector']} is held no more",
    "A hold was rejected: there are too many": lambda fields: (
        f"A hold of {fields['selector']} was rejected: there are too many"
    ),
    "An operator declared a GPU healthy": lambda fields: (
        f"An operator declared the GPU {fields['uuid']} healthy"
    ),
    "The driver is released": lambda fields: (
        f"The driver is released for {fields['for_ns'] // 1_000_000_000} s,"
        f" {counted(fields['gpus'], 'GPU')} unavailable meanwhile"
    ),
    "A task runs again": lambda fields: f"The task {fields['task']} runs again",
    "A task ended and will be started again": lambda fields: (
        f"The task {fields['task']} ended and will be started again: {fields['detail']}"
    ),
    "Facts were lost because the inbox was full": lambda fields: (
        f"{counted(fields['count'], 'fact')} of {fields['source']} lost because the inbox was full,"
        f" {fields['total']} so far"
    ),
}
