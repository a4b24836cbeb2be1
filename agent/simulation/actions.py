"""Everything that can be made to happen on a simulated node: one table for scenarios, inject and its help.

Guarantees: an action names GPUs by position (``3``) or UUID, and its parameters are text until its row has
read them, wherever they came from. A row's docstrings and fields are its documentation.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

from agent.core.wording import counted
from agent.errors import ConfigError, NvmlCode, UsageError
from agent.simulation.action_table import (
    Action,
    Applicable,
    Invocation,
    Parameter,
    action,
    choice,
    name_text,
    parameter,
    summary_of,
    whole_number,
)
from agent.simulation.agent_actions import AGENT_ACTIONS
from agent.simulation.kernel_actions import KERNEL_ACTIONS
from agent.simulation.process_actions import PROCESS_ACTIONS
from agent.simulation.reading_actions import READING_ACTIONS
from agent.simulation.roots import (
    load_modules,
    remove_pci_device,
    unload_modules,
    write_pci_device,
)
from agent.simulation.sharing_actions import SHARING_ACTIONS
from agent.spelling import suggestion

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

KUBELET: Final = "kubelet"
"""The first word of every action on the kubelet; the second is the fault's name."""
DEFAULT_RESOURCE: Final = "nvidia.com/gpu"

_INSTANCE: Final = whole_number(0, 254)
_XID: Final = whole_number(1, 65_535)
_MAX_GPUS: Final = 32
_MAX_AMOUNT: Final = 1_024


@dataclass(frozen=True, slots=True)
class Xid:
    """Report an XID error of a GPU, or of a MIG device with gi and ci."""

    xid: int = parameter("XID", "The error's number, such as 79", _XID)
    gpu: str = parameter(
        "GPU", 'Position or UUID; "unreadable" for a GPU that no longer reports its UUID', name_text
    )
    gi: int | None = parameter("N", "GPU instance of the MIG device", _INSTANCE, default=None)
    ci: int | None = parameter("N", "Compute instance of the MIG device", _INSTANCE, default=None)

    async def apply(self, node: "SimulatedNode") -> str:
        """Push the event."""
        position = None if self.gpu == "unreadable" else node.position(self.gpu)
        node.nvml.push_xid(position, self.xid, gi=self.gi, ci=self.ci)
        instance = "".join(
            f", {name} {number}" for name, number in (("gi", self.gi), ("ci", self.ci)) if number is not None
        )
        where = (
            "a GPU with an unreadable UUID" if position is None else f"{node.gpu_name(position)}{instance}"
        )
        return f"XID {self.xid} on {where}"


def _return_code(text: str) -> int | None:
    if text == "clear":
        return None
    named = NvmlCode.__members__.get(text.upper())
    try:
        return int(named) if named is not None else whole_number(0, 9_999)(text)
    except ValueError:
        raise ValueError("must be an NVML return code, by number or name, or clear") from None


@dataclass(frozen=True, slots=True)
class ReturnCode:
    """Let NVML calls answer a return code, or as usual again with the code clear."""

    code: int | None = parameter("CODE", "15, GPU_IS_LOST or another one; clear ends it", _return_code)
    call: str = parameter(
        "NAME", "A function, such as nvmlDeviceGetMemoryInfo; all is the default", name_text, default="all"
    )
    gpu: str = parameter(
        "GPU", "Position or UUID; all, the default, also means calls without a GPU", name_text, default="all"
    )

    async def apply(self, node: "SimulatedNode") -> str:
        """Force the answer, or clear it."""
        function = None if self.call == "all" else self.call
        position = None if self.gpu == "all" else node.position(self.gpu)
        gpus = "every GPU" if position is None else node.gpu_name(position)
        where = f"{function or 'every NVML call'} on {gpus}"
        if self.code is None:
            node.nvml.clear_return(function, gpu=position)
            return f"{where} answers as usual"
        node.nvml.set_return(function, self.code, gpu=position)
        return f"{where} answers code {self.code}"


_SCOPE: Final = choice("gpu", "driver")


@dataclass(frozen=True, slots=True)
class Hang:
    """Let the NVML calls on a GPU, or with the scope driver all of them, block until release."""

    scope: str = parameter("SCOPE", "gpu (the default) or driver", _SCOPE, default="gpu")
    gpu: str | None = parameter("GPU", "Position or UUID", name_text, default=None)

    def __post_init__(self) -> None:
        if (self.scope == "gpu") != (self.gpu is not None):
            raise ValueError("needs either gpu or the scope driver")

    async def apply(self, node: "SimulatedNode") -> str:
        """Start the hang."""
        position = None if self.gpu is None else node.position(self.gpu)
        node.nvml.hang(gpu=position)
        where = "of the whole driver" if position is None else f"on {node.gpu_name(position)}"
        return f"NVML calls {where} hang"


@dataclass(frozen=True, slots=True)
class Release:
    """End the hang of a GPU, of the driver with the scope driver, or every hang."""

    scope: str | None = parameter("SCOPE", "gpu or driver; every hang is the default", _SCOPE, default=None)
    gpu: str | None = parameter("GPU", "Position or UUID", name_text, default=None)

    def __post_init__(self) -> None:
        if self.gpu is not None and self.scope == "driver":
            raise ValueError("accepts either gpu or the scope driver")
        if self.gpu is None and self.scope == "gpu":
            raise ValueError("needs gpu with the scope gpu")

    async def apply(self, node: "SimulatedNode") -> str:
        """End the hang."""
        if self.gpu is not None:
            position = node.position(self.gpu)
            node.nvml.release(gpu=position)
            return f"NVML calls on {node.gpu_name(position)} answer again"
        node.nvml.release()
        if self.scope is None:
            for position in range(node.nvml.gpus):
                node.nvml.release(gpu=position)
        return "NVML calls answer again"


@dataclass(frozen=True, slots=True)
class RemoveGpu:
    """Take a GPU off the bus: NVML no longer lists it, and its handles answer an error."""

    gpu: str = parameter("GPU", "Position or UUID", name_text)
    code: int | None = parameter(
        "CODE", "What its handles answer, GPU_IS_LOST by default", _return_code, default=None
    )

    async def apply(self, node: "SimulatedNode") -> str:
        """Hide it."""
        position = node.position(self.gpu)
        node.nvml.hide_gpu(position, code=int(NvmlCode.GPU_IS_LOST) if self.code is None else self.code)
        remove_pci_device(node.spec.gpus[position], node.directory.sys)
        return f"{node.gpu_name(position)} is gone"


@dataclass(frozen=True, slots=True)
class AddGpu:
    """Bring a GPU back that was removed or not revealed."""

    gpu: str = parameter("GPU", "Position or UUID", name_text)

    async def apply(self, node: "SimulatedNode") -> str:
        """Show it."""
        position = node.position(self.gpu)
        write_pci_device(node.spec.gpus[position], node.directory.sys)
        node.nvml.reveal_gpu(position)
        return f"{node.gpu_name(position)} is there"


@dataclass(frozen=True, slots=True)
class Reveal:
    """Show just the first so many GPUs, as while a driver brings them up one after the other."""

    gpus: int = parameter("N", "How many NVML lists from now on", whole_number(0, _MAX_GPUS))

    async def apply(self, node: "SimulatedNode") -> str:
        """Show and hide."""
        if self.gpus > node.nvml.gpus:
            raise UsageError(
                f"The simulated node has {counted(node.nvml.gpus, 'GPU')}, so it cannot reveal {self.gpus}"
            )
        for position in range(node.nvml.gpus):
            if position < self.gpus:
                node.nvml.reveal_gpu(position)
            else:
                node.nvml.hide_gpu(position)
        return f"NVML lists {self.gpus} of {counted(node.nvml.gpus, 'GPU')}"


@dataclass(frozen=True, slots=True)
class Driver:
    """Load or unload the NVIDIA driver; unloaded, every NVML call answers DRIVER_NOT_LOADED.

    Its modules are gone from /sys then, and no GPU is bound to it.
    """

    state: str = parameter("STATE", "loaded or unloaded", choice("loaded", "unloaded"))

    async def apply(self, node: "SimulatedNode") -> str:
        """Load or unload."""
        if self.state == "loaded":
            load_modules(node.spec, node.directory.sys)
            node.nvml.load_driver()
        else:
            node.nvml.unload_driver()
            unload_modules(node.spec, node.directory.sys)
        return f"The driver is {self.state}"


@dataclass(frozen=True, slots=True)
class RunPod:
    """Run a pod that asks the kubelet for GPUs."""

    name: str = parameter("NAME", "The pod's name", name_text)
    gpus: int = parameter(
        "N", "How many devices it asks for, 1 by default", whole_number(0, _MAX_AMOUNT), default=1
    )
    resource: str = parameter(
        "RESOURCE", f"{DEFAULT_RESOURCE} by default", name_text, default=DEFAULT_RESOURCE
    )
    namespace: str = parameter("NAME", "default by default", name_text, default="default")

    async def apply(self, node: "SimulatedNode") -> str:
        """Admit it; a pod the kubelet rejects is a success of the simulation, and its reason is reported."""
        outcome = await node.kubelet.run_pod(self.name, self.namespace, {"main": {self.resource: self.gpus}})
        node.devices_changed()
        pod = f"Pod {self.namespace}/{self.name}"
        if not outcome.running:
            return f"{pod} is {outcome.phase}: {outcome.reason}: {outcome.message}"
        ids = [id_ for each in outcome.containers.values() for got in each.devices.values() for id_ in got]
        named = [name for each in outcome.containers.values() for name in each.cdi_devices]
        return f"{pod} runs with {', '.join(named or sorted(ids)) or 'no device'}"


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod."""

    name: str = parameter("NAME", "The pod's name", name_text)
    namespace: str = parameter("NAME", "default by default", name_text, default="default")

    async def apply(self, node: "SimulatedNode") -> str:
        """Remove it."""
        node.kubelet.delete_pod(self.name, self.namespace)
        node.devices_changed()
        return f"Pod {self.namespace}/{self.name} is deleted"


@dataclass(frozen=True, slots=True)
class _KubeletFault:
    name: str
    fault: Any
    given: Mapping[str, Any]

    async def apply(self, node: "SimulatedNode") -> str:
        await node.kubelet.apply(self.fault)
        parameters = ", ".join(f"{name} {value}" for name, value in self.given.items())
        return f"Kubelet fault {_hyphened(self.name)}" + (f" ({parameters})" if parameters else "")


_OWN: Final = (
    action(Xid, "xid", "xid"),
    action(ReturnCode, "return-code", "code"),
    action(Hang, "hang", "scope"),
    action(Release, "release", "scope"),
    action(RemoveGpu, "remove-gpu", "gpu"),
    action(AddGpu, "add-gpu", "gpu"),
    action(Reveal, "reveal", "gpus"),
    action(Driver, "driver", "state"),
    *SHARING_ACTIONS,
    *READING_ACTIONS,
    *KERNEL_ACTIONS,
    *PROCESS_ACTIONS,
    *AGENT_ACTIONS,
    action(RunPod, "run-pod", "name"),
    action(DeletePod, "delete-pod", "name"),
)


@functools.cache
def table() -> Mapping[str, Action]:
    """Return every action by name; those on the kubelet are named ``kubelet restart`` and the like."""
    from agent.simulation.kubelet.faults import FAULTS  # noqa: PLC0415 - its package loads gRPC

    on_kubelet = (_kubelet_action(name, fault) for name, fault in FAULTS.items())
    return {each.name: each for each in chain(_OWN, on_kubelet)}


def _kubelet_action(name: str, fault: Any) -> Action:
    def make(given: Mapping[str, Any]) -> Applicable:
        from agent.simulation.kubelet.faults import parse_fault  # noqa: PLC0415 - its package loads gRPC

        try:
            return _KubeletFault(name, parse_fault(name, given), given)
        except UsageError as error:
            raise ConfigError((str(error),)) from None

    hints = get_type_hints(fault)
    described = tuple(
        Parameter(each.name, _metavar(each.name, hints[each.name]), "", str, each.default is MISSING)
        for each in fields(fault)
    )
    subject = {"clear": "fault", "message_limit": "limit"}.get(name)
    return Action(f"{KUBELET} {_hyphened(name)}", summary_of(fault), described, make, subject)


def _metavar(name: str, hint: object) -> str:
    choices = [each for each in get_args(hint) if isinstance(each, str)]
    if choices:
        return "|".join(choices)
    kinds = [getattr(each, "__name__", "") for each in (hint, *get_args(hint))]
    return "TIME" if "Seconds" in kinds else "N" if "int" in kinds else name.upper()


def parse(name: str, given: Mapping[str, str]) -> Invocation:
    """Return an action by its name with its parameters; raises ConfigError with every problem."""
    row = _row(_hyphened(name))
    texts = {each.replace("-", "_"): text for each, text in given.items()}
    return Invocation(row.name, texts, row.build(texts))


def parse_mapping(given: Mapping[str, str | None]) -> Invocation:
    """Return an action as a scenario writes it: ``{xid: 79, gpu: 3}``, ``{kubelet: restart}``, ``release``.

    The key that is an action's name selects it, its value is the subject. Raises ConfigError.
    """
    first_words = {row.split()[0] for row in table()}
    heads = [key for key in given if _hyphened(key) in first_words]
    if len(heads) != 1:
        raise ConfigError((_no_head(given, heads),))
    head, value = heads[0], given[heads[0]]
    rest = {key: text for key, text in given.items() if key != head}
    if head == KUBELET:
        row = _row(f"{KUBELET} {_hyphened(value or '')}")
    else:
        row = _row(_hyphened(head))
        if value is not None and row.subject is not None:
            rest = {row.subject: value, **rest}
        elif value is not None:
            raise ConfigError((f"{row.name} accepts no value of its own",))
    return parse(row.name, {key: text for key, text in rest.items() if text is not None})


def _no_head(given: Mapping[str, str | None], heads: Sequence[str]) -> str:
    if heads:
        return f"one action at a time, not {' and '.join(heads)}; write a list"
    key = next(iter(given), "")
    shown = key[:80] or "an empty action"
    return f"{shown} is no action{suggestion(_hyphened(key), table())}; {known_actions()}"


def _row(name: str) -> Action:
    row = table().get(name)
    if row is None:
        raise ConfigError((f"{name[:80]} is no action{suggestion(name, table())}; {known_actions()}",))
    return row


def known_actions() -> str:
    """Return the names of all actions, for the end of a sentence."""
    own = ", ".join(row.name for row in _OWN)
    faults = ", ".join(name.split()[1] for name in table() if name.startswith(f"{KUBELET} "))
    return f"known: {own}, and kubelet with {faults}"


def _hyphened(name: str) -> str:
    return name.strip().replace("_", "-")
