"""``gpu-agent events``: show what happened."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, cast

from agent.client import TIMEOUT_S, AgentClient, find_agent
from agent.errors import AgentUnreachableError, UsageError
from agent.option_values import duration_from
from agent.render import WIDTH, Output, add_agent_flag, add_output_flag, show

WAIT_S: Final = 20
RETRY_S: Final = 0.5

_DESCRIPTION: Final = """\
Show what happened on this node since the agent was started: the newest 1024
events.

Examples:
  gpu-agent events
  gpu-agent events -w                 and what happens from now on
  gpu-agent events --since 5m
  gpu-agent events -o json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = _DESCRIPTION
    parser.add_argument("-w", "--watch", action="store_true", help="Go on until interrupted")
    parser.add_argument(
        "--since", metavar="WHEN", default="0", help='Only events after a number, or within a time as "5m"'
    )
    add_output_flag(parser)
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Ask the agent and print the events."""
    number, oldest_ns = _since(args.since)
    agent = find_agent(args.control_socket)
    output = Output(args.output)
    if output in (Output.JSON, Output.YAML) and not args.watch:
        document = agent.get(f"/v1/events?since={number}")
        document["events"] = [event for event in _events(document) if _is_recent(event, oldest_ns)]
        show(document, output)
        return 0
    try:
        for event in _stream(agent, number, is_endless=args.watch):
            if _is_recent(event, oldest_ns):
                print(_line(event, output), flush=args.watch)
    except KeyboardInterrupt:
        # Asking for an end is the way out of an endless command.
        return 0
    return 0


def _since(text: str) -> tuple[int, int]:
    """Return (number, monotonic moment) after which events are shown."""
    if text.isascii() and text.isdigit():
        return int(text), 0
    try:
        return 0, time.monotonic_ns() - duration_from(text)
    except ValueError as error:
        raise UsageError(f'--since {error} or the number of an event, and is "{text[:80]}"') from None


def _stream(agent: AgentClient, number: int, *, is_endless: bool) -> Iterator[dict[str, Any]]:
    document = _asked(agent, number, wait_s=0)
    yield from _events(document)
    while is_endless:
        try:
            document = _asked(agent, cast("int", document["last"]), wait_s=WAIT_S)
        except AgentUnreachableError:
            _wait_for(agent)
        else:
            yield from _events(document)


def _asked(agent: AgentClient, number: int, *, wait_s: int) -> dict[str, object]:
    document = agent.get(f"/v1/events?since={number}&wait={wait_s}", timeout_s=TIMEOUT_S + wait_s)
    if document["missed"]:
        print(f"gpu-agent: {document['missed']} older events are kept no more", file=sys.stderr)
    return document


def _wait_for(agent: AgentClient) -> None:
    """Wait until an agent answers: it may be restarted while it is watched."""
    print("gpu-agent: The agent is away; waiting for its return", file=sys.stderr)
    while not agent.accepts():
        time.sleep(RETRY_S)


def _events(document: dict[str, object]) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", document["events"])


def _is_recent(event: dict[str, Any], oldest_ns: int) -> bool:
    return bool(event["time_monotonic_ns"] >= oldest_ns)


def _line(event: dict[str, Any], output: Output) -> str:
    match output:
        case Output.JSON | Output.YAML:
            return json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        case Output.NAME:
            return str(event["number"])
        case Output.TABLE | Output.WIDE:
            details = " ".join(f"{name}={_shown(value)}" for name, value in event["fields"].items())
            moment = str(event["time"])[11:19]
            mark = "!" if event["warning"] else " "
            line = f"{moment} {mark} {event['kind']:12} {event['message']}  {details}".rstrip()
            return line if output is Output.WIDE or len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
