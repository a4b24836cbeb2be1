"""argparse for the commands: errors are UsageErrors, help fits a terminal."""

import argparse
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

from agent.config import flags
from agent.config.option import Option
from agent.errors import ConfigError, UsageError

HELP_WIDTH: Final = 79


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors, unknown flags with a suggestion."""

    def __init__(self, command: str) -> None:
        super().__init__(
            prog=f"gpu-agent {command}",
            usage=f"gpu-agent {command} [flags]",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        self.accepted_options: tuple[Option, ...] = ()
        """Options of ``gpu-agent run`` whose flags this command accepts too."""

    def accept_options(self, options: Iterable[Option]) -> None:
        """Accept the flags of these options as ``gpu-agent run`` does; ``settings`` holds the given ones."""
        self.accepted_options = tuple(options)

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of printing usage; the sentence names the help."""
        raise UsageError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the arguments, or raise ConfigError with every unknown one."""
        values, problems, others = flags.split(arguments, self.accepted_options)
        parsed, unknown = self.parse_known_args(others)
        problems += (self._complaint(word) for word in unknown)
        if problems:
            raise ConfigError(tuple(problems))
        parsed.settings = values
        return parsed

    def _complaint(self, word: str) -> str:
        from agent.spelling import suggestion  # noqa: PLC0415 - only where something is wrong

        if not word.startswith("-"):
            return f'"{word[:80]}" is not expected here; see {self.prog} --help'
        name = word.partition("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings if flag[:2] == "--"]
        known += (f"--{name}" for option in self.accepted_options for name in (option.name, *option.aliases))
        return f'"{name[:80]}" is no flag{suggestion(name, known)}; see {self.prog} --help'


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they are written, and every line within a terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=HELP_WIDTH)
