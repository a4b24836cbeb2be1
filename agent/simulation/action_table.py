"""How an action on the simulated node is described, read and made: the form of the table in ``actions``.

An action is a frozen record: its docstring the help, its fields the parameters, each with the parser of
its text. Scenario files, ``gpu-agent inject`` and the control socket all come through ``Action.build``.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Protocol

from agent.core.wording import listed
from agent.errors import ConfigError
from agent.spelling import suggestion

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

MAX_TEXT: Final = 4_096
"""Characters of one parameter."""


class Applicable(Protocol):
    """An action with all its parameters."""

    async def apply(self, node: "SimulatedNode") -> str:
        """Do it; returns what was done, in one sentence. Raises AgentError where it cannot be done."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an action."""

    name: str
    metavar: str
    help: str
    parse: Callable[[str], object]
    """Raises ValueError with the end of a sentence that begins with the parameter's name."""
    is_required: bool


@dataclass(frozen=True, slots=True)
class Action:
    """A row of the table. ``subject`` is the parameter whose value follows the action's name."""

    name: str
    summary: str
    parameters: tuple[Parameter, ...]
    make: Callable[[Mapping[str, Any]], Applicable]
    """Builds the action from parsed values; raises ValueError where they do not go together."""
    subject: str | None = None

    def build(self, given: Mapping[str, str]) -> Applicable:
        """Return the action with these parameters; raises ConfigError with every problem."""
        known = {parameter.name: parameter for parameter in self.parameters}
        values: dict[str, object] = {}
        problems: list[str] = []
        for name, text in given.items():
            if name not in known:
                unknown = f"{self.name} has no parameter {name[:80]}{suggestion(name, known)}"
                problems.append(f"{unknown}; it accepts: {', '.join(known) or 'none'}")
                continue
            try:
                values[name] = known[name].parse(text[:MAX_TEXT])
            except ValueError as error:
                problems.append(f'{self._called(name)} {error}, not "{text[:80]}"')
        missing = [each for each in self.parameters if each.is_required and each.name not in given]
        problems += [self._missing(each) for each in missing]
        if problems:
            raise ConfigError(tuple(problems))
        try:
            return self.make(values)
        except ValueError as error:
            raise ConfigError((f"{self.name} {error}",)) from None

    def _called(self, name: str) -> str:
        """Return what a person calls a parameter: the subject is what stands after the action's name."""
        return self.name if name == self.subject else f"{name} of {self.name}"

    def _missing(self, parameter: Parameter) -> str:
        wanted = "a value" if parameter.name == self.subject else parameter.name
        return f"{self.name} needs {wanted}" + (f": {parameter.help}" if parameter.help else "")

    @property
    def usage(self) -> str:
        """How it is written on the command line, without the program's name."""
        words = [self.name]
        for each in sorted(self.parameters, key=lambda each: each.name != self.subject):
            word = each.metavar if each.name == self.subject else f"--{each.name} {each.metavar}"
            words.append(word if each.is_required else f"[{word}]")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Invocation:
    """An action that was asked for: its parameters as given, and ready to be applied."""

    name: str
    given: Mapping[str, str]
    action: Applicable

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{name}={text}" for name, text in self.given.items())])


def parameter(
    metavar: str, text: str, parse: Callable[[str], object] = str, *, default: object = MISSING
) -> Any:
    """Return a field of an action's record that is a parameter."""
    metadata = {"metavar": metavar, "help": text, "parse": parse}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def action(record: Callable[..., Applicable], name: str, subject: str | None = None) -> Action:
    """Return the row of a record that is an action."""
    described = tuple(
        Parameter(
            name=each.name,
            metavar=each.metadata["metavar"],
            help=each.metadata["help"],
            parse=each.metadata["parse"],
            is_required=each.default is MISSING,
        )
        for each in fields(record)  # type: ignore[arg-type]  # the record is a dataclass
    )
    return Action(name, summary_of(record), described, lambda values: record(**values), subject)


def summary_of(documented: object) -> str:
    """Return the first paragraph of a docstring, as one line without a full stop."""
    paragraph = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return " ".join(paragraph.replace("``", "").split()).rstrip(".")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise ValueError(f"must be a whole number between {least} and {most}")
        return int(text)

    return parse


def choice(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts one of these words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {listed(choices, 'or')}")
        return text

    return parse


def name_text(text: str) -> str:
    """Parse a name: not empty, printable, without white space."""
    if not text or not text.isprintable() or any(char.isspace() for char in text):
        raise ValueError("must be a name without spaces")
    return text
