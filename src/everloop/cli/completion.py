"""`everloop completion SHELL`: a script that completes commands, actions and flags in bash, zsh or fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from .main import Parser, parser

HOW = {
    "bash": 'add to ~/.bashrc: eval "$(everloop completion bash)"',
    "zsh": 'add to ~/.zshrc: eval "$(everloop completion zsh)"',
    "fish": "run: everloop completion fish > ~/.config/fish/completions/everloop.fish",
}


def command(options: argparse.Namespace) -> int:
    words = dict(_words(parser(), ""))
    make = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell]
    print(f"# everloop, {options.shell}: {HOW[options.shell]}\n{make(words)}")
    return 0


def _words(of: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """What can follow each command, by its path, such as "cron add"."""
    below: dict[str, Parser] = {}
    words: list[str] = []
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
        words += [option for option in action.option_strings if option.startswith("--")]
        if not action.option_strings and action.choices and not isinstance(action, argparse._SubParsersAction):
            words += [str(choice) for choice in action.choices]
    yield path, [*below, *words]
    for name, parser_below in below.items():
        yield from _words(parser_below, f"{path} {name}".strip())


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"    '{path}') words='{' '.join(found)}' ;;" for path, found in words.items() if path)
    return f"""_everloop() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} path="" one words
    for one in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $one" in
{_known(words, "            ")}
        esac
    done
    case "${{path# }}" in
{cases}
    *) words='{" ".join(words[""])}' ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [ ${{#COMPREPLY[@]}} -eq 0 ]; then COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F _everloop everloop"""


def _known(words: dict[str, list[str]], indent: str) -> str:
    return "\n".join(f"{indent}' {path}') path=' {path}' ;;" for path in words if path)


def _zsh(words: dict[str, list[str]]) -> str:
    return f"autoload -Uz bashcompinit && bashcompinit\n{_bash(words)}"


def _fish(words: dict[str, list[str]]) -> str:
    lines = ["complete -c everloop -f"]
    for path, found in words.items():
        parts = path.split()
        seen = " ".join(f"; and __fish_seen_subcommand_from {part}" for part in parts).removeprefix("; and ")
        deeper = [word for word in found if not word.startswith("-")]
        none = f"not __fish_seen_subcommand_from {' '.join(deeper)}" if deeper else ""
        when = "; and ".join(filter(None, [seen, none])) or "true"
        for word in found:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c everloop -n '{when}' {what}")
    return "\n".join(lines)
