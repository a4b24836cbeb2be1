"""The manual page gpu-agent(1), made of the parsers; ``make gen`` writes it, and a check compares it.

Source: man(7) and groff_man(7) of groff.
"""

import sys
from collections.abc import Iterator

from agent.commands.extras import not_installed
from agent.commands.parsers import Argument, Described, described
from agent.commands.table import all_groups

_FILES = {
    "/var/lib/gpu-agent/state.json": "Conditions, holds and counts, kept over restarts and reboots.",
    "/var/lib/gpu-agent/events.jsonl": "The event log.",
    "/run/gpu-agent/control.sock": "The agent's socket for commands, open to root only.",
    "/var/lib/kubelet/device-plugins/": "The kubelet's socket, and the agent's beside it.",
    "/var/run/cdi/": "CDI specifications, with a CDI strategy.",
}


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield ".\\\" Made by make gen from the commands' parsers; do not edit."
    yield '.TH GPU-AGENT 1 2026-11-30 gpu-agent "User Commands"'
    # Adjusted to both sides, lines with long flags are full of holes.
    yield ".ad l"
    yield ".SH NAME"
    yield "gpu-agent \\- advertise a node's GPUs to the kubelet, watch their health and show their use"
    yield ".SH SYNOPSIS"
    yield ".B gpu-agent"
    yield ".I COMMAND"
    yield "[flags]"
    yield ".SH DESCRIPTION"
    yield "The GPU node agent: device plugin, health and preflight. Each command below has"
    yield ".B \\-\\-help"
    yield "with examples."
    title = ""
    for group, each in described():
        if group.title != title:
            title = group.title
            yield f".SH {_escaped(title).upper()}"
            if group.extra:
                yield "These commands come with the extra"
                yield f".BR {_escaped(group.extra)} ,"
                yield "which nodes do not need."
        yield from _command(each)
    yield ".SH EXIT STATUS"
    yield ".TP\n.B 0\nSuccess."
    yield ".TP\n.B 1\nFailed, or not ready."
    yield ".TP\n.B 2\nUsage, bad configuration, or the answer is unknown."
    yield ".SH FILES"
    for path, text in _FILES.items():
        yield f".TP\n.I {_escaped(path)}\n{text}"


def _command(described: Described) -> Iterator[str]:
    yield f'.SS "{_escaped(described.command.name)}"'
    for line in described.usage.splitlines():
        yield f".B {_escaped(' '.join(line.split()))}\n.br"
    text, _, examples = described.description.partition("\nExamples:\n")
    yield ".PP"
    yield _escaped(" ".join(text.split()))
    shown, _, more = examples.partition("\n\n")
    if shown:
        yield ".PP\nExamples:\n.PP\n.nf"
        yield from (_escaped(line) for line in shown.rstrip().splitlines())
        yield ".fi"
    if more.strip():
        yield ".PP"
        yield _escaped(" ".join(more.split()))
    for each in described.arguments:
        if "--help" not in each.names:
            yield from _argument(each)


def _argument(argument: Argument) -> Iterator[str]:
    names = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in argument.names)
    value = f"\\fI{_escaped(argument.metavar)}\\fR" if argument.metavar else ""
    yield ".TP"
    yield " ".join(part for part in (names, value) if part)
    yield _escaped(argument.help) + "."


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("^", "\\(ha")
    text = text.replace("~", "\\(ti").replace('"', "\\(dq")
    # A control line begins with one of these.
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    if not any(group.extra for group in all_groups()):
        sys.exit(str(not_installed("The manual page")))
    print("\n".join(page()))
