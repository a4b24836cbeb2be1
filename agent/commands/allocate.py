"""``gpu-agent allocate``: what a container would get, without a kubelet and without allocating anything."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import asdict

from agent.commands.client import find_agent
from agent.commands.render import Output, add_agent_flag, add_output_flag, show
from agent.config.settings import Settings
from agent.model.policy import Injection

_FIELD_OF_FLAG: Final = {
    "device-list-strategy": "strategies",
    "device-id-strategy": "ids",
    "pass-device-specs": "pass_device_specs",
}

_DESCRIPTION: Final = """\
Show what a container would get for these devices: the exact AllocateResponse
as JSON. Nothing is allocated and the kubelet is not asked. The command asks
the running agent, which needs root; with --scenario it reads a simulated node
instead, which starts nothing and needs no rights.

A device is its id, or shorter: its UUID, the GPU's index, index:j for a MIG
device; a shared device stands for its next free share, unless ::n names one.
CDI names are not resolved in spec files, and the key of a CDI annotation ends
in zeros where the real one has a random UUID.

Examples:
  gpu-agent allocate 0 3
  gpu-agent allocate --scenario xid-79 --strategy envvar,cdi-cri 0
  gpu-agent allocate --scenario my.yaml --config-file config.yaml 0::2 1
  gpu-agent allocate --strategy cdi-annotations --id-strategy index 0:1
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "gpu-agent allocate [flags] ID..."
    parser.description = _DESCRIPTION
    parser.add_argument("ids", metavar="ID", nargs="+", help="A device: id, UUID, index or index:j, and ::n")
    parser.add_argument("--scenario", metavar="NAME|FILE", help="Use this scenario's node")
    parser.add_argument(
        "--strategy",
        "--device-list-strategy",
        dest="strategies",
        metavar="LIST",
        action="append",
        help="envvar, volume-mounts, cdi-annotations, cdi-cri; several with commas",
    )
    parser.add_argument(
        "--id-strategy",
        "--device-id-strategy",
        metavar="HOW",
        help="How a container names its devices: uuid or index",
    )
    parser.add_argument("--pass-device-specs", action="store_true", help="Give device nodes too")
    parser.add_argument(
        "--config-file",
        metavar="FILE",
        help="Inject as this file configures; its sharing applies with --scenario only",
    )
    parser.add_argument("--resource", metavar="NAME", help="Such as nvidia.com/mig-1g.10gb")
    add_output_flag(parser, Output.JSON, Output.YAML)
    add_agent_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Print the answer; a rejected request is the error."""
    given = _flags(args)
    response = _simulated(args, given) if args.scenario is not None else _asked(args, given)
    show(response, Output(args.output))
    return 0


def _flags(args: argparse.Namespace) -> dict[str, str]:
    """Return the given ones of the agent's own options."""
    values = {
        "device-list-strategy": ",".join(args.strategies) if args.strategies else None,
        "device-id-strategy": args.id_strategy,
        "pass-device-specs": "true" if args.pass_device_specs else None,
        "config-file": args.config_file,
    }
    return {name: value for name, value in values.items() if value is not None}


def _settings(flags: Mapping[str, str]) -> Settings:
    from agent.config.load import load  # noqa: PLC0415 - only for settings that differ from the agent's

    return load(flags, {})


def _simulated(args: argparse.Namespace, given: Mapping[str, str]) -> object:
    from agent.commands.extras import scenario_node  # noqa: PLC0415 - help must appear at once
    from agent.runtime.dry_run import dry_run  # noqa: PLC0415

    return dry_run(scenario_node(args.scenario, given).snapshot, args.ids, resource=args.resource)


def _asked(args: argparse.Namespace, given: Mapping[str, str]) -> object:
    body: dict[str, Any] = {"ids": args.ids, "injection": _changes(given)}
    if args.resource is not None:
        body["resource"] = args.resource
    return find_agent(args.control_socket).send_command("allocate", body)["response"]


def _changes(given: Mapping[str, str]) -> dict[str, object]:
    """Return the fields of the agent's injection that this request changes."""
    if not given:
        return {}
    injection: Injection = _settings(given).policy.injection
    if "config-file" in given:
        return asdict(injection)
    return {_FIELD_OF_FLAG[name]: getattr(injection, _FIELD_OF_FLAG[name]) for name in given}
