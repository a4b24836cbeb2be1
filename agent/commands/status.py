"""``gpu-agent status``: show the running agent and why the node is not ready."""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agent.commands.question import Question, add_question_flags, ask
from agent.commands.render import NONE, UNKNOWN, age, size, table
from agent.core.wording import counted

_DESCRIPTION: Final = """\
Show the running agent, what it advertises, and why the node is not ready for
GPU jobs. The exit code is 0 whenever the agent answered, ready or not.

Examples:
  gpu-agent status
  gpu-agent status -o wide            with the names of each GPU
  gpu-agent status -w                 again after every change
  gpu-agent status -o json
"""


TIER_COSTS: Final = {
    "driver": "only driver calls cost more",
    "syscalls": "each system call costs 10 to 55 ns more, each ioctl 90 to 270, by CPU",
}
"""Overhead of a probe tier. Source: make bench ARGS="--only PROBE"; the higher figures are those of a CPU
with return mitigations."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    add_question_flags(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the answer."""
    return ask(args, _QUESTION)


def status_lines(document: dict[str, Any], *, now_ns: int, is_wide: bool = False) -> list[str]:
    """Return the status for people; ``now_ns`` is monotonic, as the document's moments."""
    agent = document["agent"]
    up = age(agent["uptime_s"] * 1_000_000_000)
    lines = [
        f"Agent    {agent['version']}, {agent['phase']} for {up}, process {agent['pid']}",
        *_observing(document),
        f"Driver   {_driver(document['driver'])}",
        *_released(document, now_ns=now_ns),
        *_probe(document.get("probe")),
        *_usage(document.get("usage")),
        f"GPUs     {_gpus(document['gpus'])}{_out_of_service(document)}",
        *_unadvertised(document),
        *(f"Held     {selector}: {why}" for selector, why in document.get("holds", {}).items()),
        f"Ready    {'yes' if document['ready'] else 'no'}",
    ]
    for reason in document["reasons"]:
        lines.append(f"  {reason['code']}: {reason['message']}")
        lines += [f"    {place}" for place in places(reason["gpus"], document["gpus"])]
        lines += [f"    {line}" for line in involved_processes(reason, document.get("conditions", ()))]
        lines.append(f"    {reason['advice']}")
    failing = {name: why for name, why in agent.get("parts", {}).items() if why is not None}
    lines += [f"Failing  {name}: {why}" for name, why in failing.items()]
    for part in agent.get("off", ()):
        lines.append(f"Off      {part['name']}: {part['why']}")
        lines.append(f"         {part['remedy']}")
    lines += _config(agent.get("config", {}))
    lines += ["", *_resources(document["resources"], is_wide=is_wide)]
    return [*lines, "", *_gpu_table(document["gpus"])] if is_wide else lines


def _config(config: dict[str, Any]) -> list[str]:
    lines = []
    if config.get("trouble"):
        lines.append(f"Config   unchanged, the new file is rejected: {config['trouble']}")
    if config.get("awaiting_restart"):
        lines.append(f"Config   takes effect at the next start: {', '.join(config['awaiting_restart'])}")
    return lines


def _observing(document: dict[str, Any]) -> list[str]:
    if not document.get("observe"):
        return []
    flips = document["observed_flips"]
    return [f"Mode     observing: nothing is registered; devices it would have set Unhealthy: {flips}"]


def _driver(driver: dict[str, Any]) -> str:
    if driver["ready"]:
        cuda = driver["cuda_version"] or UNKNOWN
        return f"{driver['driver_version']}, NVML {driver['nvml_version']}, CUDA {cuda}"
    return str(driver["message"] or "not initialised yet")


def _probe(probe: dict[str, Any] | None) -> list[str]:
    match probe:
        case None:
            return []
        case {"state": "loading"}:
            return ["Probe    being loaded"]
        case {"state": "disabled", "code": "not_wanted"}:
            return [f"Probe    off (not_wanted): {probe['message']}"]
        case {"state": "disabled"}:
            line = f"Probe    off ({probe['code']}): {probe['message']}"
            return [line, "         The agent loads it at its start: restart it once that is fixed"]
    headers = f", headers={probe['headers']}" if probe["headers"] else ""
    lines = [
        f"Probe    tier {probe['tier']}, loader {probe['loader']}{headers}",
        f"         {TIER_COSTS[probe['tier']]}",
    ]
    if probe.get("entry_points"):
        lines.append(f"         traces {', '.join(probe['entry_points'])}")
    if probe.get("pinned"):
        lines.append(f"         kept in {probe['pinned']} over restarts of the agent")
    if probe.get("not_pinned"):
        lines.append(f"         not kept over restarts of the agent: {probe['not_pinned']}")
    if probe.get("why_not_driver"):
        lines.append(f"         not tier driver, which costs less: {probe['why_not_driver']}")
    return [*lines, *(f"         {name} is not attached: {why}" for name, why in probe["missing"].items())]


def _usage(usage: dict[str, Any] | None) -> list[str]:
    """Return the lines on what the usage data lacks."""
    if usage is None:
        return []
    lines = [] if usage["complete"] else [f"         incomplete: {usage['incomplete_because']}"]
    kept = [
        counted(count, *nouns)
        for nouns, count in (
            (("lost event",), usage["events_lost"]),
            (("evicted object or file", "evicted objects or files"), usage["evicted"]),
        )
        if count
    ]
    return [*lines, *([f"         so far {' and '.join(kept)}"] if kept else [])]


def _released(document: dict[str, Any], *, now_ns: int) -> list[str]:
    until_ns = document.get("released_until_monotonic_ns")
    if until_ns is None:
        return []
    is_released = document["driver_released"]
    state = "released on request" if is_released else "being released on request"
    return [f"         {state}, for {age(until_ns - now_ns)} more; gpu-agent resume ends it"]


def _unadvertised(document: dict[str, Any]) -> Iterator[str]:
    """Yield what is not advertised although it is healthy."""
    gpus_of: dict[str, list[str]] = {}
    for each in document.get("unoffered", ()):
        detail = f" ({each['detail']})" if each["detail"] else ""
        gpus_of.setdefault(f"{each['message']}{detail}", []).append(each["gpu_uuid"])
    for message, uuids in gpus_of.items():
        yield f"         {message}"
        yield from (f"           {place}" for place in places(list(dict.fromkeys(uuids)), document["gpus"]))


def _out_of_service(document: dict[str, Any]) -> str:
    """Return the numbers of GPUs that an operator, or flapping, keeps Unhealthy over a reset."""
    shown = []
    for code in ("held", "maintenance", "flapping"):
        number = len({each["gpu_uuid"] for each in document.get("conditions", ()) if each["code"] == code})
        shown += [f"{number} {code}"] if number else []
    return f" ({', '.join(shown)})" if shown else ""


def _gpus(gpus: list[dict[str, Any]]) -> str:
    counts = {
        health: sum(gpu["health"] == health for gpu in gpus) for health in ("healthy", "unhealthy", "unknown")
    }
    shown = [f"{number} {health}" for health, number in counts.items() if number]
    return ", ".join(shown) if shown else NONE


def _resources(resources: list[dict[str, Any]], *, is_wide: bool) -> list[str]:
    rows = [
        [str(resource[name]) for name in ("resource", "capacity", "allocatable", "registration", "message")]
        for resource in resources
    ]
    return table(("RESOURCE", "CAPACITY", "ALLOCATABLE", "REGISTRATION", "MESSAGE"), rows, is_wide=is_wide)


def _gpu_table(gpus: list[dict[str, Any]]) -> list[str]:
    names = ("index", "uuid", "pci", "serial", "health", "model")
    rows = [[UNKNOWN if gpu[name] is None else str(gpu[name]) for name in names] for gpu in gpus]
    return table(("GPU", "UUID", "PCI", "SERIAL", "HEALTH", "MODEL"), rows, is_wide=True)


_QUESTION: Final = Question(
    "/debug/state",
    names=lambda document: (resource["resource"] for resource in document["resources"]),
    lines=lambda document, now_ns, is_wide: status_lines(document, now_ns=now_ns, is_wide=is_wide),
)


MAX_PROCESSES: Final = 4
"""Processes named with one reason; ``gpu-agent owners`` has all."""

Json = Mapping[str, Any]


def places(uuids: Sequence[str], gpus: Sequence[Json]) -> Iterator[str]:
    """Yield a line for each GPU of a reason; one for all of them."""
    known = {gpu["uuid"]: gpu for gpu in gpus}
    if len(uuids) > 1 and set(uuids) == known.keys():
        yield f"on all {len(uuids)} GPUs"
        return
    for uuid in uuids:
        yield f"on {_place(uuid, known.get(uuid))}"


def _place(uuid: str, gpu: Json | None) -> str:
    if gpu is None:
        return uuid
    name = gpu["pci"] if gpu["index"] is None else f"GPU {gpu['index']} at {gpu['pci']}"
    return f"{name} ({uuid})"


def involved_processes(reason: Json, conditions: Iterable[Json]) -> Iterator[str]:
    """Yield a line for each process of a usage finding, or one that the finding is clearing."""
    found = [
        each
        for each in conditions
        if each["code"] == reason["code"] and each.get("details") and each["message"] in reason["message"]
    ]
    if found and not any(each["lasts"] for each in found):
        yield "no longer observed; clears after clean probes and a quiet time"
        return
    lines = [_process(each) for one in found if one["lasts"] for each in one["details"]["culprits"]]
    yield from lines[:MAX_PROCESSES]
    more = len(lines[MAX_PROCESSES:]) + sum(one["details"]["more"] for one in found)
    if more:
        yield f"and {more} more"


def _process(each: Json) -> str:
    parts = [f"pid {each['pid']} ({each['comm'] or UNKNOWN})", str(each["pod"] or each["owner"])]
    if each["role"] == "owner":
        parts.append("exited")
    if each["contexts"] != 0 or each["role"] == "owner":
        number = each["contexts"]
        parts.append(f"contexts: {UNKNOWN if number is None else number}")
    if each["used_bytes"] is not None:
        parts.append(size(each["used_bytes"]))
    if each["role"] != "owner" and not each["killable"]:
        parts.append(f"cannot be killed now (state {each['state'] or UNKNOWN})")
    return ", ".join(parts)
