"""Scenario files: a node, what happens to it, and what the kubelet must show in the end.

    node: dgx-h100                # a preset, or one with changes: {preset: 8x-a100, gpus: 4, gpu: {…}}
    agent: {poll: 1s}             # options of gpu-agent run
    config: {sharing: {…}}        # its configuration file, if it is to have one
    steps:
      - expect: {resource: nvidia.com/gpu, capacity: 8, allocatable: 8}
      - {at: 2s, do: {xid: 79, gpu: 3}}
    until: {resource: nvidia.com/gpu, capacity: 8, allocatable: 7}
    timeout: 40s

A step is applied when ``at`` (from the start) has come and the step before is done, and ``after`` has
passed since then; it waits until the kubelet has shown what ``expect`` states. Leading steps at 0s without
``after`` and ``expect`` are there before the agent is. After ``{agent: kill}`` a demo starts the agent anew.
An expectation may also be of what the agent reports: ``{probe: running}``, ``{condition: context_leak,
kind: pod_gone, gpu: 3}``, or with ``active: false`` that it does so no more.

Guarantees: a file is read strictly and as a whole; every problem is reported, with file, line and path.
"""

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

import yaml

from agent.config.option import Option
from agent.config.options import OPTIONS
from agent.config.values import bool_from, duration_from
from agent.config.yaml_tree import Node
from agent.core.wording import listed
from agent.errors import ConfigError, UsageError
from agent.model.health import LeakKind, Reason
from agent.simulation import actions
from agent.simulation.action_table import Invocation
from agent.simulation.agent_actions import is_kill
from agent.simulation.directory import agent_config, agent_flags
from agent.simulation.document import Document, read
from agent.simulation.expectation import ConditionExpectation, Expectation
from agent.simulation.presets import NodeSpec, PresetError, load_preset
from agent.simulation.process_actions import NEED_DRIVER
from agent.spelling import suggestion

SHIPPED: Final = Path(__file__).parent / "scenarios"

MAX_STEPS: Final = 200
MAX_ACTIONS: Final = 20
"""Actions of one step."""
MAX_NS: Final = 24 * 3_600_000_000_000

_KEYS: Final = ("node", "agent", "config", "steps", "until", "timeout")
_STEP_KEYS: Final = ("at", "after", "do", "expect")
_COUNTED_KEYS: Final = ("capacity", "allocatable", "registrations")
_CONDITION_KEYS: Final = ("kind", "gpu", "active")
"""The keys of an expectation that need a condition."""
_EXPECTATION_KEYS: Final = ("resource", *_COUNTED_KEYS, "probe", "condition", *_CONDITION_KEYS)
_DEFAULT_RESOURCE: Final = "nvidia.com/gpu"
_DEFAULT_TIMEOUT_NS: Final = 60_000_000_000
_MAX_COUNT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens to the node; see the module's description."""

    at_ns: int
    do: tuple[Invocation, ...]
    expect: Expectation | None = None
    after_ns: int = 0

    @property
    def is_setup(self) -> bool:
        """Whether it waits for nothing."""
        return self.at_ns == 0 and self.after_ns == 0 and self.expect is None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario file, valid and complete."""

    name: str
    label: str
    """What the node is called: its preset, with a mark where the file changes it."""
    node: NodeSpec
    steps: tuple[Step, ...]
    until: Expectation
    timeout_ns: int = _DEFAULT_TIMEOUT_NS
    agent: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Options of ``gpu-agent run`` by name."""
    config: str | None = None
    """The configuration file the agent starts with."""

    def agent_flags(self, node_dir: Path) -> dict[str, str]:
        """Return what the scenario adds to the options of the agent on its node."""
        own = {} if self.config is None else {"config-file": str(agent_config(node_dir))}
        return own | dict(self.agent)

    @property
    def setup(self) -> tuple[Step, ...]:
        """The leading steps that are applied before an agent can read the node."""
        return tuple(itertools.takewhile(lambda step: step.is_setup, self.steps))

    @property
    def kills(self) -> int:
        """How often it kills the agent."""
        invocations = (invocation for step in self.steps for invocation in step.do)
        return sum(is_kill(invocation.name, invocation.given) for invocation in invocations)

    @property
    def needs_driver(self) -> bool:
        """Whether device files have to answer."""
        return any(invocation.name in NEED_DRIVER for step in self.steps for invocation in step.do)


def shipped_names() -> tuple[str, ...]:
    """Return the names of the scenarios that come with the program."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.yaml")))


def load(given: str) -> Scenario:
    """Return the scenario of a name or path; raises UsageError, ConfigError with every problem."""
    path = _path_of(given)
    document = read(path, "scenario")
    scenario = _Reader(document, Path(path).stem).scenario()
    if document.problems or scenario is None:
        raise ConfigError(tuple(document.problems))
    return scenario


def _path_of(given: str) -> str:
    if os.sep in given or given.endswith((".yaml", ".yml")) or not given:
        return given
    if given in shipped_names():
        return str(SHIPPED / f"{given}.yaml")
    if Path(given).exists():
        return given
    raise UsageError(
        f"There is no scenario {given}{suggestion(given, shipped_names())}; "
        f"those that come with gpu-agent: {', '.join(shipped_names())}; a file is given by its path"
    )


class _Reader:
    """Walks the tree of one scenario; what is wrong is noted in the document."""

    def __init__(self, document: Document, name: str) -> None:
        self._doc = document
        self._name = name

    def scenario(self) -> Scenario | None:
        """Return the scenario; one with problems noted must not be used."""
        root = self._doc.root
        if root is None:
            self._doc.problem(None, f"the file is empty; it needs {', '.join(_KEYS)}")
            return None
        found = self._known("", root, _KEYS)
        if "node" not in found:
            self._doc.problem(root, "node is missing; write a preset, such as dgx-h100")
        if "until" not in found:
            self._doc.problem(root, "until is missing; write what the kubelet must show in the end")
        node = self._node(found.get("node"))
        agent = self._agent(found.get("agent"))
        config = self._config(found.get("config"))
        steps = self._steps(found.get("steps"))
        until = self._expectation("until", found.get("until"))
        timeout_ns = self._duration("timeout", found.get("timeout"), _DEFAULT_TIMEOUT_NS)
        if node is None:
            return None
        label, spec = node
        return Scenario(self._name, label, spec, steps, until, timeout_ns, agent, config)

    def _known(self, path: str, node: Node, known: tuple[str, ...]) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for key, value in self._doc.pairs(path, node):
            if key in known:
                found[key] = value
            else:
                full = f"{path}.{key}" if path else key
                self._doc.problem(
                    value, f"{full[:100]} is unknown{suggestion(key, known)}; known: {', '.join(known)}"
                )
        return found

    def _node(self, node: Node | None) -> tuple[str, NodeSpec] | None:
        if node is None:
            return None
        plain = self._doc.plain("node", node)
        try:
            if isinstance(plain, str):
                return plain, load_preset(plain)
            if isinstance(plain, dict):
                return f"{plain.get('preset', 'node')} (changed)", load_preset(plain)
        except PresetError as error:
            self._doc.problem(node, f"node: {error}")
        else:
            self._doc.problem(node, "node must be a preset, such as dgx-h100, or a mapping that changes one")
        return None

    def _agent(self, node: Node | None) -> Mapping[str, str]:
        flags: dict[str, str] = {}
        own = agent_flags(Path())
        for key, value in self._doc.pairs("agent", node) if node is not None else ():
            option = OPTIONS.get(key)
            text = self._doc.text(f"agent.{key}"[:100], value)
            if option is None:
                known = tuple(OPTIONS)
                self._doc.problem(value, f"agent.{key[:100]} is no option of run{suggestion(key, known)}")
            elif key in own:
                self._doc.problem(value, f"agent.{key} is set by the simulated node itself")
            else:
                flags[key] = self._option_text(value, option, text or "")
        return MappingProxyType(flags)

    def _config(self, node: Node | None) -> str | None:
        """Return the text of the configuration file; whether it is valid, the agent decides."""
        if node is None:
            return None
        plain = self._doc.plain("config", node)
        if not isinstance(plain, dict):
            self._doc.problem(node, "config must hold keys and values, as a configuration file does")
            return None
        return yaml.safe_dump(plain, sort_keys=False)

    def _option_text(self, node: Node, option: Option, text: str) -> str:
        try:
            if text or not option.empty_means:
                option.parse(text)
        except ValueError as error:
            self._doc.problem(node, f'agent.{option.name} {error}, not "{text[:40]}"')
        return text

    def _steps(self, node: Node | None) -> tuple[Step, ...]:
        if node is None:
            return ()
        nodes = list(self._doc.items("steps", node))
        if len(nodes) > MAX_STEPS:
            self._doc.problem(node, f"steps holds {len(nodes)} entries, more than {MAX_STEPS}")
        steps = [self._step(f"steps[{index}]", each) for index, each in enumerate(nodes[:MAX_STEPS])]
        for index, (earlier, later) in enumerate(itertools.pairwise(steps)):
            if later.at_ns < earlier.at_ns:
                self._doc.problem(nodes[index + 1], f"steps[{index + 1}].at is before the step above it")
        return tuple(steps)

    def _step(self, path: str, node: Node) -> Step:
        found = self._known(path, node, _STEP_KEYS)
        if not found.keys() & {"do", "expect"}:
            self._doc.problem(node, f"{path} needs do or expect")
        return Step(
            at_ns=self._duration(f"{path}.at", found.get("at"), 0),
            do=self._actions(f"{path}.do", found["do"]) if "do" in found else (),
            expect=self._expectation(f"{path}.expect", found["expect"]) if "expect" in found else None,
            after_ns=self._duration(f"{path}.after", found.get("after"), 0),
        )

    def _actions(self, path: str, node: Node) -> tuple[Invocation, ...]:
        nodes = list(self._doc.items(path, node)) if node.id == "sequence" else [node]
        if len(nodes) > MAX_ACTIONS:
            self._doc.problem(node, f"{path} holds {len(nodes)} actions, more than {MAX_ACTIONS}")
        found = (self._action(path, each) for each in nodes[:MAX_ACTIONS])
        return tuple(each for each in found if each is not None)

    def _action(self, path: str, node: Node) -> Invocation | None:
        given: dict[str, str | None] = {}
        if node.id == "scalar":
            given[self._doc.text(path, node) or ""] = None
        else:
            for key, value in self._doc.pairs(path, node):
                given[key] = self._doc.text(f"{path}.{key}", value)
        try:
            return actions.parse_mapping(given)
        except ConfigError as error:
            for problem in error.problems:
                self._doc.problem(node, f"{path}: {problem}")
            return None

    def _expectation(self, path: str, node: Node | None) -> Expectation:
        if node is None:
            return Expectation(_DEFAULT_RESOURCE)
        found = self._known(path, node, _EXPECTATION_KEYS)
        if not found.keys() & {*_COUNTED_KEYS, "probe", "condition"}:
            self._doc.problem(node, f"{path} needs {', '.join(_COUNTED_KEYS)}, condition or probe")
        resource = self._doc.text(f"{path}.resource", found["resource"]) if "resource" in found else None
        return Expectation(
            resource or _DEFAULT_RESOURCE,
            self._count(f"{path}.capacity", found.get("capacity")),
            self._count(f"{path}.allocatable", found.get("allocatable")),
            self._count(f"{path}.registrations", found.get("registrations")),
            self._condition(path, node, found),
            self._word(f"{path}.probe", found.get("probe"), ("running",)) is not None,
        )

    def _condition(self, path: str, node: Node, found: Mapping[str, Node]) -> ConditionExpectation | None:
        code = self._word(f"{path}.condition", found.get("condition"), tuple(Reason))
        if "condition" not in found and found.keys() & set(_CONDITION_KEYS):
            self._doc.problem(
                node, f"{path} has {listed(_CONDITION_KEYS, 'or')} without a condition; write condition too"
            )
        kind = self._word(f"{path}.kind", found.get("kind"), tuple(LeakKind))
        gpu = self._count(f"{path}.gpu", found.get("gpu"))
        active = self._bool(f"{path}.active", found.get("active"))
        if code is None:
            return None
        return ConditionExpectation(Reason(code), None if kind is None else LeakKind(kind), gpu, active)

    def _word(self, path: str, node: Node | None, known: tuple[str, ...]) -> str | None:
        text = self._doc.text(path, node) if node is not None else None
        if node is None or text in known:
            return text
        meant = suggestion(text or "", known)
        self._doc.problem(node, f'{path} must be {listed(known, "or")}, not "{(text or "")[:40]}"{meant}')
        return None

    def _bool(self, path: str, node: Node | None) -> bool:
        text = self._doc.text(path, node) if node is not None else None
        try:
            return True if text is None else bool_from(text)
        except ValueError as error:
            self._doc.problem(node, f'{path} {error}, not "{(text or "")[:40]}"')
            return True

    def _count(self, path: str, node: Node | None, *, least: int = 0) -> int | None:
        if node is None:
            return None
        text = self._doc.text(path, node)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 9 and least <= int(text) <= _MAX_COUNT):
            self._doc.problem(
                node, f'{path} must be a whole number between {least} and {_MAX_COUNT}, not "{text[:40]}"'
            )
            return None
        return int(text)

    def _duration(self, path: str, node: Node | None, default_ns: int) -> int:
        text = self._doc.text(path, node) if node is not None else None
        if text is None:
            return default_ns
        try:
            duration_ns = 0 if text == "0" else duration_from(text)
        except ValueError as error:
            self._doc.problem(node, f'{path} {error}, not "{text[:40]}"')
            return default_ns
        if duration_ns > MAX_NS:
            self._doc.problem(node, f"{path} must be at most 24h")
        return duration_ns
