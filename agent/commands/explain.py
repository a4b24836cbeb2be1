"""``gpu-agent explain``: explain reason codes and XIDs, from the tables that the agent itself uses."""

import argparse
import textwrap
from collections.abc import Iterable
from typing import Any, Final

from agent.commands.render import Output, add_output_flag, show, table
from agent.core import xids
from agent.core.reasons import REASON_SPECS
from agent.errors import UsageError
from agent.model.health import Reason, Recovery
from agent.model.policy import Policy

_WIDTH: Final = 78

_NARROW: Final = frozenset({"code", "xid", "name", "flips", "compat", "catalog", "recovery", "says"})
"""Columns of the table of 80 characters."""

_DESCRIPTION: Final = """\
Explain reason codes and XIDs: what was detected, how certain it is, whether
it makes devices Unhealthy, how they recover, and the next step. It needs no
agent.

Examples:
  gpu-agent explain                   every reason code
  gpu-agent explain gpu_lost
  gpu-agent explain xid 79
  gpu-agent explain --xids -o json    every XID of NVIDIA's catalog
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "gpu-agent explain [CODE|XID] [flags]"
    parser.description = _DESCRIPTION
    parser.add_argument("what", metavar="CODE|XID", nargs="*", help="A reason code or the number of an XID")
    parser.add_argument("--xids", action="store_true", help="List XIDs instead of reason codes")
    add_output_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Print the table, or one row of it."""
    output = Output(args.output)
    if args.what:
        _show_one(_row_of(" ".join(args.what)), output)
        return 0
    rows = (
        [xid_row(xid) for xid in sorted(xids.CLASSES)]
        if args.xids
        else [reason_row(each) for each in REASON_SPECS]
    )
    if output in (Output.JSON, Output.YAML):
        show({"apiVersion": "gpu-agent/v1", "xids" if args.xids else "reasons": rows}, output)
    elif output is Output.NAME:
        print("\n".join(str(next(iter(row.values()))) for row in rows))
    else:
        print("\n".join(_table(rows, is_wide=output is Output.WIDE)))
    return 0


def reason_row(reason: Reason) -> dict[str, Any]:
    """Return the table's row of a reason code."""
    spec = REASON_SPECS[reason]
    return {
        "code": reason.value,
        "severity": spec.severity.value,
        "evidence": spec.evidence.value,
        "flips": spec.flips,
        "recovery": spec.recovery.value,
        "says": spec.summary,
        "advice": spec.advice,
    }


def xid_row(xid: int) -> dict[str, Any]:
    """Return the table's row of an XID, with its effect under both policies."""
    return {
        "xid": xid,
        "name": xids.NAMES.get(xid, ""),
        "class": xids.class_of(xid).value,
        "compat": "flips" if xids.flips(xid, Policy(xid_policy="compat")) else "ignored",
        "catalog": "flips" if xids.flips(xid, Policy(xid_policy="catalog")) else "ignored",
        "recovery": xids.recovery_of(xid).value,
        "unless": [
            f"{each.xid_class} if {each.when} ({each.summary})"
            for each in xids.REFINEMENTS
            if xid in each.codes
        ],
        "witnesses": _witnesses_of(xid),
        "advice": xids.advice_of(xid),
    }


def _witnesses_of(xid: int) -> list[str]:
    """Return the reasons that confirm an XID from the kernel log, beside NVML's own event."""
    if xids.recovery_of(xid) is Recovery.SELF_CLEARING:
        return []
    readings = xids.WITNESSES.get(xids.class_of(xid), frozenset())
    return sorted(
        reason.value for reason, spec in REASON_SPECS.items() if spec.confirms_log_line or reason in readings
    )


def _row_of(text: str) -> dict[str, Any]:
    number = text.lower().removeprefix("xid").strip(" -_")
    if number.isascii() and number.isdigit() and len(number) <= 6:
        return xid_row(int(number))
    try:
        return reason_row(Reason(text.lower()))
    except ValueError:
        from agent.spelling import suggestion  # noqa: PLC0415 - only where something is wrong

        hint = suggestion(text, (reason.value for reason in Reason))
        raise UsageError(f'"{text[:40]}" is no reason code{hint}; see gpu-agent explain') from None


def _show_one(row: dict[str, Any], output: Output) -> None:
    match output:
        case Output.JSON | Output.YAML:
            show({"apiVersion": "gpu-agent/v1", **row}, output)
        case Output.NAME:
            print(next(iter(row.values())))
        case Output.TABLE | Output.WIDE:
            for name, value in row.items():
                print(textwrap.fill(f"{name + ':':10} {_text(value)}", _WIDTH, subsequent_indent=" " * 11))


def _table(rows: Iterable[dict[str, Any]], *, is_wide: bool) -> list[str]:
    listed = list(rows)
    names = [name for name in listed[0] if is_wide or name in _NARROW]
    cells = [[_text(row[name]) for name in names] for row in listed]
    return table([name.upper() for name in names], cells, is_wide=is_wide)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "<none>"
    return str(value) if value != "" else "<none>"
