"""Checks that container runtimes load a CDI specification, and finds the oldest version it fits.

Runtimes read a specification strictly: one unknown field, or one that is newer than the version it states,
and none of its devices can be resolved. So every specification is checked before it is written. This module
has the whole format, whether or not this agent writes it; null stands for a field that is absent.

Source: cncf-tags/container-device-interface:SPEC.md, specs-go/config.go, specs-go/version.go, pkg/parser,
pkg/cdi/container-edits.go.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

Json = Mapping[str, Any]

VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Released versions of the specification, the oldest first."""

MAX_PROBLEMS: Final = 20

HOOKS: Final = frozenset(
    ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
)

_DNS_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_KIND: Final = re.compile(
    rf"(?=[^/]{{1,253}}/)[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?(?:\.{_DNS_LABEL})*"
    r"/[A-Za-z](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_PERMISSIONS: Final = re.compile(r"[rwm]*|none")
_PATH: Final = re.compile(r"/[^\x00-\x1f\x7f]*")
_PLACE: Final = re.compile(r"[^\x00-\x1f\x7f]+")
"""A mount's source: a path of the host, or a word such as ``tmpfs`` where the mount's type wants one."""
_ENVIRONMENT: Final = re.compile(r"[^=\x00]+=[^\x00]*")
_CLASS_OF_SERVICE: Final = re.compile(r"/|(?!\.\.?$)[^/\n\x00]{0,4095}")

_DROPPED: Final = {"enableCMT": "1.1.0", "enableMBM": "1.1.0"}
"""Fields of ``intelRdt`` by the version that removed them."""

Problems = Iterator[str]
Check = Callable[[Any, str], Problems]


def problems_of(document: object) -> tuple[str, ...]:
    """Return the problems of a specification, each with its place; at most MAX_PROBLEMS."""
    found = tuple(islice(_specification(document, ""), MAX_PROBLEMS))
    if found or not isinstance(document, Mapping):
        return found
    stated = document["cdiVersion"]
    place = VERSIONS.index(_plain_version(stated))
    newer = tuple(
        f"cdiVersion: {stated} has no {what}, which came with {version}"
        for version, what in dict.fromkeys(_newer_features(document))
        if VERSIONS.index(version) > place
    )
    older = tuple(
        f"cdiVersion: {stated} has no {field} any more, which went with {_DROPPED[field]}"
        for field in dict.fromkeys(_dropped_fields(document))
        if VERSIONS.index(_DROPPED[field]) <= place
    )
    return newer + older


def name_problem(name: str) -> str | None:
    """Return why a device cannot have a name; None: it can."""
    return next(_matching(_NAME, "a device name")(name, "its CDI name"), None)


def oldest_version(document: Json) -> str:
    """Return the oldest version of the specification that has every field of a well-formed one."""
    return max((version for version, _ in _newer_features(document)), default=VERSIONS[0], key=VERSIONS.index)


def _newer_features(document: Json) -> Iterator[tuple[str, str]]:
    """Yield each field that is not in the oldest version, with the version that added it."""
    _, _, name = document.get("kind", "").partition("/")
    if "." in name:
        yield "0.6.0", "a dot in the class"
    if document.get("annotations"):
        yield "0.6.0", "annotations"
    for device in document["devices"]:
        if device["name"][:1].isdigit():
            yield "0.5.0", "a device name that begins with a digit"
        if device.get("annotations"):
            yield "0.6.0", "annotations"
    for edits in _all_edits(document):
        yield from _newer_edits(edits)


def _all_edits(document: Json) -> Iterator[Json]:
    yield document.get("containerEdits") or {}
    yield from (device["containerEdits"] for device in document["devices"])


def _newer_edits(edits: Json) -> Iterator[tuple[str, str]]:
    if any(mount.get("type") for mount in edits.get("mounts") or ()):
        yield "0.4.0", "type of a mount"
    if any(node.get("hostPath") for node in edits.get("deviceNodes") or ()):
        yield "0.5.0", "hostPath of a device node"
    if edits.get("additionalGids"):
        yield "0.7.0", "additionalGids"
    intel = edits.get("intelRdt")
    if intel is not None:
        yield "0.7.0", "intelRdt"
        if intel.get("schemata") is not None:
            yield "1.1.0", "schemata of intelRdt"
        if intel.get("enableMonitoring"):
            yield "1.1.0", "enableMonitoring of intelRdt"
    if edits.get("netDevices"):
        yield "1.1.0", "netDevices"


def _dropped_fields(document: Json) -> Iterator[str]:
    for edits in _all_edits(document):
        intel: Json = edits.get("intelRdt") or {}
        yield from (field for field in _DROPPED if field in intel)


def _specification(document: object, where: str) -> Problems:
    yield from _record(
        document,
        where,
        required={"cdiVersion": _version, "kind": _matching(_KIND, "a kind"), "devices": _devices},
        optional={"annotations": _annotations, "containerEdits": _edits},
    )


def _plain_version(text: str) -> str:
    # Runtimes accept it with a v, too.
    return text.removeprefix("v")


def _version(value: object, where: str) -> Problems:
    if not isinstance(value, str) or _plain_version(value) not in VERSIONS:
        yield f"{where}: must be a released version, not {_shown(value)}"


def _devices(value: object, where: str) -> Problems:
    yield from _list_of(_device)(value, where)
    if isinstance(value, list):
        if not value:
            yield f"{where}: must not be empty"
        names = [device["name"] for device in value if isinstance(device, Mapping) and "name" in device]
        for name, times in Counter(map(str, names)).items():
            if times > 1:
                yield f"{where}: {_shown(name)} is there twice"


def _device(value: object, where: str) -> Problems:
    yield from _record(
        value,
        where,
        required={"name": _matching(_NAME, "a device name"), "containerEdits": _some_edits},
        optional={"annotations": _annotations},
    )


def _some_edits(value: object, where: str) -> Problems:
    if isinstance(value, Mapping) and all(each in (None, [], "") for each in value.values()):
        yield f"{where}: must not be empty"
    yield from _edits(value, where)


def _edits(value: object, where: str) -> Problems:
    yield from _record(
        value,
        where,
        required={},
        optional={
            "env": _list_of(_matching(_ENVIRONMENT, "NAME=VALUE")),
            "deviceNodes": _list_of(_node),
            "mounts": _list_of(_mount),
            "hooks": _list_of(_hook),
            "additionalGids": _list_of(_UINT32),
            "intelRdt": _intel_rdt,
            "netDevices": _net_devices,
        },
    )


def _node(value: object, where: str) -> Problems:
    optional = {
        "hostPath": _path,
        "type": _one_of(frozenset(("", *"bcup"))),
        "permissions": _matching(_PERMISSIONS, "permissions"),
        "major": _INT64,
        "minor": _INT64,
        "fileMode": _UINT32,
        "uid": _UINT32,
        "gid": _UINT32,
    }
    yield from _record(value, where, required={"path": _path}, optional=optional)


def _mount(value: object, where: str) -> Problems:
    yield from _record(
        value,
        where,
        required={"hostPath": _matching(_PLACE, "a path"), "containerPath": _path},
        optional={"options": _list_of(_text), "type": _text},
    )


def _hook(value: object, where: str) -> Problems:
    yield from _record(
        value,
        where,
        required={"hookName": _one_of(HOOKS), "path": _path},
        optional={
            "args": _list_of(_text),
            "env": _list_of(_matching(_ENVIRONMENT, "NAME=VALUE")),
            "timeout": _number(1, 2**31 - 1),
        },
    )


def _intel_rdt(value: object, where: str) -> Problems:
    optional = {
        "closID": _matching(_CLASS_OF_SERVICE, "the name of a class of service"),
        "l3CacheSchema": _text,
        "memBwSchema": _text,
        "schemata": _list_of(_text),
        "enableMonitoring": _truth,
        **dict.fromkeys(_DROPPED, _truth),
    }
    yield from _record(value, where, required={}, optional=optional)


def _net_devices(value: object, where: str) -> Problems:
    yield from _list_of(_net_device)(value, where)
    devices = value if isinstance(value, list) else []
    for field in ("hostInterfaceName", "name"):
        given = [each[field] for each in devices if isinstance(each, Mapping) and field in each]
        for name, times in Counter(map(str, given)).items():
            if times > 1:
                yield f"{where}: {field} {_shown(name)} is there twice"


def _net_device(value: object, where: str) -> Problems:
    word = _matching(_PLACE, "the name of an interface")
    yield from _record(value, where, required={"hostInterfaceName": word, "name": word}, optional={})


def _truth(value: object, where: str) -> Problems:
    if not isinstance(value, bool):
        yield f"{where}: must be true or false, not {_shown(value)}"


def _annotations(value: object, where: str) -> Problems:
    if not isinstance(value, Mapping):
        yield f"{where}: must be an object, not {_shown(value)}"
        return
    for key, each in value.items():
        yield from _text(each, f"{where}.{key}")


def _record(
    value: object, where: str, *, required: Mapping[str, Check], optional: Mapping[str, Check]
) -> Problems:
    if not isinstance(value, Mapping):
        yield f"{where or 'the document'}: must be an object, not {_shown(value)}"
        return
    prefix = f"{where}." if where else ""
    known = {**required, **optional}
    for key in value:
        if key not in known:
            yield f"{prefix}{key}: is no field of a specification, so runtimes reject the file"
    for key, check in known.items():
        if value.get(key) is not None:
            yield from check(value[key], f"{prefix}{key}")
        elif key in required:
            yield f"{prefix}{key}: is missing"


def _list_of(check: Check) -> Check:
    def check_value(value: object, where: str) -> Problems:
        if not isinstance(value, list):
            yield f"{where}: must be a list, not {_shown(value)}"
            return
        for number, each in enumerate(value):
            yield from check(each, f"{where}[{number}]")

    return check_value


def _matching(pattern: re.Pattern[str], what: str) -> Check:
    def check_value(value: object, where: str) -> Problems:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            yield f"{where}: must be {what}, not {_shown(value)}"

    return check_value


def _one_of(known: frozenset[str]) -> Check:
    def check_value(value: object, where: str) -> Problems:
        if not isinstance(value, str) or value not in known:
            yield f"{where}: must be one of {', '.join(sorted(known - {''}))}, not {_shown(value)}"

    return check_value


def _number(least: int, most: int) -> Check:
    def check_value(value: object, where: str) -> Problems:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            yield f"{where}: must be an integer between {least} and {most}, not {_shown(value)}"

    return check_value


def _text(value: object, where: str) -> Problems:
    if not isinstance(value, str) or "\0" in value:
        yield f"{where}: must be text, not {_shown(value)}"


_UINT32: Final = _number(0, 2**32 - 1)
_INT64: Final = _number(-(2**63), 2**63 - 1)
_path: Final = _matching(_PATH, "an absolute path")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
