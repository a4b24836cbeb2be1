"""``gpu-agent events``: show the events of this node."""

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, cast

from agent.commands.client import TIMEOUT_S, AgentClient, find_agent
from agent.commands.question import wait_for
from agent.commands.render import Output, add_agent_flag, add_output_flag, fitted, local_time, show
from agent.config.values import duration_from
from agent.core.wording import counted, printable
from agent.errors import AgentError, AgentUnreachableError, UsageError
from agent.log import printable_json, rfc3339, wall_clock
from agent.views import event_files
from agent.views.sentences import sentence_of

WAIT_S: Final = 20

_DESCRIPTION: Final = """\
Show the newest 1024 events since the agent was started. With a time in
--since the command reads older ones from the event log on disk, which also
has those from before the agent was started.

Examples:
  gpu-agent events
  gpu-agent events -w                 with those from now on
  gpu-agent events --since 1h
  gpu-agent events --since 2026-11-30T04:00:00Z -o json
  gpu-agent events --file /var/lib/gpu-agent/events.jsonl
"""


class _Since(NamedTuple):
    """The lower bound of the events shown: a number of the running agent, or a moment."""

    number: int = 0
    moment: datetime | None = None

    def is_shown(self, event: dict[str, Any]) -> bool:
        """Return whether an event is recent enough."""
        return self.moment is None or str(event["time"]) >= rfc3339(self.moment)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    parser.add_argument("-w", "--watch", action="store_true", help="Continue until interrupted")
    parser.add_argument(
        "--since",
        metavar="WHEN",
        default="0",
        help='Only events after a number, a moment, or within a time as "5m"',
    )
    parser.add_argument("--file", metavar="PATH", help="Read this event log instead of asking an agent")
    add_output_flag(parser)
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Read the events from the agent and from disk, and print them."""
    since = _since(args.since)
    output = Output(args.output)
    if args.file is not None:
        if args.watch:
            raise UsageError("--watch asks an agent, --file reads a file; give one of them")
        if not event_files.exist(args.file):
            raise AgentError(f"There is no event log {args.file}; an agent keeps events.jsonl in --state-dir")
        _print(_of_file(args.file, since), output)
        return 0
    agent = find_agent(args.control_socket)
    if not args.watch:
        document = agent.get(f"/v1/events?since={since.number}")
        _print([*_older(agent, document, since), *_shown_of(document, since)], output, document)
        return 0
    try:
        for event in _stream(agent, since):
            print(_line(event, output), flush=True)
    except KeyboardInterrupt:
        # Ctrl-C is how an endless command is stopped.
        return 0
    return 0


def _since(text: str) -> _Since:
    if text.isascii() and text.isdigit():
        return _Since(number=int(text))
    try:
        return _Since(moment=wall_clock() - timedelta(microseconds=duration_from(text) / 1_000))
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
        return _Since(moment=moment.astimezone(UTC))
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f'--since must be the number of an event, a time such as "5m", or a moment such as '
            f'"2026-11-30T04:00:00Z", and is "{text[:80]}"'
        ) from None


def _print(events: list[dict[str, Any]], output: Output, document: dict[str, object] | None = None) -> None:
    if output in (Output.JSON, Output.YAML):
        show((document or {"apiVersion": "gpu-agent/v1"}) | {"events": events}, output)
        return
    if document is not None:
        _note_missed(document, is_on_disk=any("boot" in event for event in events))
    for event in events:
        print(_line(event, output))


def _older(agent: AgentClient, document: dict[str, object], since: _Since) -> list[dict[str, Any]]:
    """Return the recent enough events on disk that the agent has evicted, or never had."""
    oldest = next(iter(_events(document)), None)
    if since.moment is None or (oldest is not None and not since.is_shown(oldest)):
        return []
    state: dict[str, Any] = agent.get("/debug/state")
    log_file = state["agent"]["event_log"]
    if log_file is None:
        return []
    events = _of_file(log_file["path"], since)
    if oldest is None:
        return events
    edge = (oldest["time_monotonic_ns"], oldest["number"])
    boot = state["agent"]["boot"]
    return [
        event
        for event in events
        if event.get("boot") != boot or (event["time_monotonic_ns"], event["number"]) < edge
    ]


def _of_file(path: str, since: _Since) -> list[dict[str, Any]]:
    try:
        return [event for event in event_files.read(path) if since.is_shown(event)]
    except OSError as error:
        raise AgentError(f"Could not read the event log {path}: {error.strerror}") from None
    except event_files.NoEventsError:
        raise UsageError(
            f"{path} holds no event, so it is no event log; an agent keeps events.jsonl in --state-dir"
        ) from None


def _shown_of(document: dict[str, object], since: _Since) -> list[dict[str, Any]]:
    return [event for event in _events(document) if since.is_shown(event)]


def _stream(agent: AgentClient, since: _Since) -> Iterator[dict[str, Any]]:
    document = agent.get(f"/v1/events?since={since.number}")
    _note_missed(document)
    yield from _older(agent, document, since)
    yield from _shown_of(document, since)
    while True:
        try:
            target = f"/v1/events?since={document['last']}&wait={WAIT_S}"
            document = agent.get(target, timeout_s=TIMEOUT_S + WAIT_S)
        except AgentUnreachableError:
            wait_for(agent)
        else:
            _note_missed(document)
            yield from _events(document)


def _note_missed(document: dict[str, object], *, is_on_disk: bool = False) -> None:
    if document.get("missed") and not is_on_disk:
        number = cast("int", document["missed"])
        verb = "was" if number == 1 else "were"
        print(f"gpu-agent: {counted(number, 'older event')} {verb} evicted", file=sys.stderr)


def _events(document: dict[str, object]) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", document["events"])


def _line(event: dict[str, Any], output: Output) -> str:
    match output:
        case Output.JSON | Output.YAML:
            return printable_json(event)
        case Output.NAME:
            return str(event["number"])
        case Output.TABLE | Output.WIDE:
            is_wide = output is Output.WIDE
            return fitted(event_line(event, is_wide=is_wide), is_wide=is_wide)


def event_line(event: dict[str, Any], *, is_wide: bool = False) -> str:
    """Return an event as a sentence for people, the wide one with its fields."""
    mark = "!" if event["warning"] else " "
    sentence = sentence_of(event["message"], event["fields"])
    pairs = [f"{name}={_shown(value)}" for name, value in event["fields"].items()]
    text = "  ".join((sentence, " ".join(pairs))) if is_wide and pairs else sentence
    return printable(f"{local_time(event['time'])} {mark} {event['kind']:12} {text}")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
