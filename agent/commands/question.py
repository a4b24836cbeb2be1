"""What a command reads from a running agent: shown once, or with ``-w`` again after every change.

Guarantees: a terminal shows one screen, redrawn in place, with ages that go on. Elsewhere a change of time
alone prints nothing: ``json`` is one document on a line, ``yaml`` one behind ``---``, a table stands behind
an empty line. The command waits for an agent that restarts meanwhile.
"""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from agent.commands.client import AgentClient, find_agent
from agent.commands.render import Output, add_agent_flag, add_output_flag, for_people, is_terminal, show
from agent.errors import AgentUnreachableError
from agent.log import printable_json

PERIOD_S: Final = 1.0
"""Poll period of ``-w``: not every change is an event that the agent could wait for."""
RETRY_S: Final = 0.5

_MOMENT: Final = "_monotonic_ns"
_VOLATILE: Final = frozenset(
    {"changed", "event_log", "facts", "log_lines", "sample", "seen", "took_ns", "uptime_s"}
)
"""Keys whose values change in a document without an event: figures, and the time of the last reading."""
_BUSY_OR_NOT: Final = ("R", "S")
"""States between which a working process alternates."""
_HOME: Final = "\x1b[H\x1b[J"
_PAINT: Final = re.compile("\x1b\\[[0-9;]*m")

Document = dict[str, Any]


def _nothing(_document: Document) -> Iterable[str]:
    return ()


class Question(msgspec.Struct, frozen=True):
    """A document and the ways to show it."""

    path: str
    names: Callable[[Document], Iterable[str]]
    lines: Callable[[Document, int, bool], list[str]]
    """The table of a document at a monotonic moment; whether it is the wide one."""
    notes: Callable[[Document], Iterable[str]] = _nothing
    """The limits of what the table shows."""


def add_question_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``-w``, ``-o`` and ``--control-socket``."""
    parser.add_argument(
        "-w", "--watch", action="store_true", help="Show it again after every change, until interrupted"
    )
    add_output_flag(parser)
    add_agent_flag(parser)


def ask(args: argparse.Namespace, question: Question) -> int:
    """Ask the agent and print the answer, or every answer from now on."""
    agent, output = find_agent(args.control_socket), Output(args.output)
    shown = for_programs if output in (Output.JSON, Output.YAML) else for_people
    if not args.watch:
        _show(question, shown(agent.get(question.path)), output)
        return 0
    try:
        _watch(question, map(shown, documents(agent, question.path)), output)
    except KeyboardInterrupt:
        # Ctrl-C is how an endless command is stopped.
        return 0
    return 0


def for_programs(document: Document) -> Document:
    """Return the document as it is: the JSON and YAML writers escape it."""
    return document


def documents(agent: AgentClient, path: str, *, period_s: float = PERIOD_S) -> Iterator[Document]:
    """Yield a document now and in every period, without end."""
    yield agent.get(path)
    while True:
        time.sleep(period_s)
        try:
            yield agent.get(path)
        except AgentUnreachableError:
            wait_for(agent)


def wait_for(agent: AgentClient) -> None:
    """Wait until an agent answers: it may restart while a command watches it."""
    print("gpu-agent: The agent does not answer; waiting for it", file=sys.stderr)
    while not agent.accepts():
        time.sleep(RETRY_S)


def _watch(question: Question, seen: Iterable[Document], output: Output) -> None:
    if output in (Output.TABLE, Output.WIDE) and is_terminal(sys.stdout):
        for screen in _screens(question, seen, is_wide=output is Output.WIDE):
            print(_HOME + "\n".join(screen), flush=True)
        return
    for number, document in enumerate(changed(question, seen, output)):
        match output:
            case Output.JSON:
                print(printable_json(document))
            case Output.YAML:
                print("---")
                _show(question, document, output)
            case _:
                if number:
                    print()
                _show(question, document, output)
        sys.stdout.flush()


def _show(question: Question, document: Document, output: Output) -> None:
    match output:
        case Output.JSON | Output.YAML:
            show(document, output)
        case Output.NAME:
            for name in question.names(document):
                print(name)
        case Output.TABLE | Output.WIDE:
            print("\n".join(question.lines(document, time.monotonic_ns(), output is Output.WIDE)))
            for note in question.notes(document):
                print(note, file=sys.stderr)


def changed(question: Question, seen: Iterable[Document], output: Output) -> Iterator[Document]:
    """Yield the documents whose shown content differs from the one before."""
    before: object = None
    for document in seen:
        now = _shown_content(question, _without_volatile(document), output)
        if now != before:
            before = now
            yield document


def _shown_content(question: Question, document: Document, output: Output) -> object:
    match output:
        case Output.JSON | Output.YAML:
            return document
        case Output.NAME:
            return list(question.names(document))
        case Output.TABLE | Output.WIDE:
            lines = question.lines(document, 0, output is Output.WIDE)
            return [*lines, *question.notes(document)]


def _without_volatile(value: Any) -> Any:
    """Return a document without the values that change by time alone."""
    if isinstance(value, list):
        return [_without_volatile(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: 0 if _is_volatile(key, value) else _without_volatile(each) for key, each in value.items()}


def _is_volatile(key: str, document: Mapping[str, object]) -> bool:
    if key == "state" and document[key] in _BUSY_OR_NOT:
        return True
    # A moment is given twice, and its wall-clock time differs by a little in each document.
    return key.removesuffix(_MOMENT) in _VOLATILE or f"{key}{_MOMENT}" in document


def _screens(question: Question, seen: Iterable[Document], *, is_wide: bool) -> Iterator[list[str]]:
    before: list[str] = []
    for document in seen:
        lines = [*question.lines(document, time.monotonic_ns(), is_wide), *question.notes(document)]
        columns, rows = shutil.get_terminal_size()
        screen = fitting(lines, columns=columns, rows=rows)
        if screen != before:
            before = screen
            yield screen


def fitting(lines: list[str], *, columns: int, rows: int) -> list[str]:
    """Return the lines that fit on a screen above the cursor's line, counting how long ones wrap."""
    room, shown = max(1, rows - 1), 0
    for line in lines:
        room -= max(1, -(-len(_PAINT.sub("", line)) // max(1, columns)))
        if room < (shown < len(lines) - 1):
            break
        shown += 1
    hidden = len(lines) - shown
    return [*lines[:shown], f"… and {hidden} more"] if hidden else lines
