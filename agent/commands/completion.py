"""``gpu-agent completion``: complete commands, flags and their values in a shell."""

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from agent.commands.parsers import Argument, Described, described

_DESCRIPTION: Final = """\
Print the completion for a shell: commands, their flags, and values that are
paths or of a closed set.

Examples:
  source <(gpu-agent completion bash)
  gpu-agent completion bash > /etc/bash_completion.d/gpu-agent
  gpu-agent completion zsh > /usr/local/share/zsh/site-functions/_gpu-agent
  gpu-agent completion fish > ~/.config/fish/completions/gpu-agent.fish
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "gpu-agent completion bash|zsh|fish"
    parser.description = _DESCRIPTION
    parser.add_argument("shell", choices=tuple(_SHELLS), metavar="SHELL", help="bash, zsh or fish")


def main(args: argparse.Namespace) -> int:
    """Print the script."""
    print("\n".join(_SHELLS[args.shell]([each for _, each in described()])))
    return 0


def _bash(commands: Iterable[Described]) -> Iterator[str]:
    listed = list(commands)
    names = " ".join(each.command.name for each in listed)
    yield "# bash completion of gpu-agent; made by gpu-agent completion bash"
    yield "_gpu_agent() {"
    # Without bash-completion's helpers: a node has a bare bash.
    yield "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words flags files"
    # Bash breaks a word at the equals sign.
    yield '    [[ $cur == = ]] && cur=""'
    yield "    [[ $prev == = ]] && prev=${COMP_WORDS[COMP_CWORD-2]}"
    yield "    COMPREPLY=()"
    yield "    if ((COMP_CWORD == 1)); then"
    yield f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$cur"))'
    yield "        return"
    yield "    fi"
    yield "    case ${COMP_WORDS[1]}:$prev in"
    for each in listed:
        for flag in each.flags:
            if flag.kind != "none":
                pattern = "|".join(f"{each.command.name}:{name}" for name in flag.names)
                yield f"    {pattern})"
                yield f"        {_bash_value(flag)}"
                yield "        return ;;"
    yield "    esac"
    yield "    case ${COMP_WORDS[1]} in"
    for each in listed:
        flags = " ".join(name for flag in each.flags for name in flag.names)
        words = " ".join(each.words)
        yield f'    {each.command.name}) words="{words}" flags="{flags}" files={int(each.takes_path)} ;;'
    yield "    esac"
    yield "    if [[ $cur == -* ]]; then"
    yield '        COMPREPLY=($(compgen -W "$flags" -- "$cur"))'
    yield "        return"
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield '    ((files)) && COMPREPLY+=($(compgen -f -- "$cur"))'
    yield "}"
    yield "complete -o filenames -F _gpu_agent gpu-agent"


def _bash_value(flag: Argument) -> str:
    if flag.choices:
        return f'COMPREPLY=($(compgen -W "{" ".join(flag.choices)}" -- "$cur"))'
    return 'COMPREPLY=($(compgen -f -- "$cur"))' if flag.kind == "path" else ":"


def _zsh(commands: Iterable[Described]) -> Iterator[str]:
    listed = list(commands)
    yield "#compdef gpu-agent"
    yield "# zsh completion of gpu-agent; made by gpu-agent completion zsh"
    yield "_gpu-agent() {"
    yield "    local -a commands"
    yield "    commands=("
    for each in listed:
        yield f"        {shlex.quote(f'{each.command.name}:{each.command.summary}')}"
    yield "    )"
    yield "    if ((CURRENT == 2)); then"
    yield "        _describe command commands"
    yield "        return"
    yield "    fi"
    yield "    local command=$words[2]"
    yield "    shift words; ((CURRENT--))"
    yield "    case $command in"
    for each in listed:
        yield f"    {each.command.name})"
        yield "        _arguments -s \\"
        for flag in each.flags:
            for name in flag.names:
                yield f"            {shlex.quote(_zsh_flag(name, flag))} \\"
        words = f"({' '.join(each.words)})" if each.words else "_files" if each.takes_path else " "
        yield f"            {shlex.quote(f'*:word:{words}')} ;;"
    yield "    esac"
    yield "}"
    # Works as an autoloaded function and by source.
    yield 'if [[ $funcstack[1] == _gpu-agent ]]; then _gpu-agent "$@"; else compdef _gpu-agent gpu-agent; fi'


def _zsh_flag(name: str, flag: Argument) -> str:
    text = "".join(f"\\{char}" if char in "[]:\\" else char for char in flag.help)
    if flag.kind == "none":
        return f"{name}[{text}]"
    values = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.kind == "path" else " "
    sign = "=" if name.startswith("--") else ""
    return f"{name}{sign}[{text}]:{flag.metavar.lower().replace(':', ' ')}:{values}"


def _fish(commands: Iterable[Described]) -> Iterator[str]:
    yield "# fish completion of gpu-agent; made by gpu-agent completion fish"
    for each in commands:
        name = each.command.name
        summary = shlex.quote(each.command.summary)
        yield f"complete -c gpu-agent -f -n __fish_use_subcommand -a {name} -d {summary}"
        here = f"complete -c gpu-agent -n '__fish_seen_subcommand_from {name}'"
        if each.words:
            yield f"{here} -f -a {shlex.quote(' '.join(each.words))}"
        for flag in each.flags:
            yield " ".join((here, *_fish_flag(flag)))


def _fish_flag(flag: Argument) -> Iterator[str]:
    for name in flag.names:
        yield f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
    yield f"-d {shlex.quote(flag.help)}"
    if flag.kind != "none":
        yield "-r"
    if flag.choices:
        yield f"-f -a {shlex.quote(' '.join(flag.choices))}"
    elif flag.kind == "path":
        yield "-F"


_SHELLS: Final[dict[str, Callable[[Iterable[Described]], Iterator[str]]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
