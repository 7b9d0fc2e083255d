"""Commands that run other commands: `env`, `timeout`, `xargs`, `bash -c`, `find -exec` and the like."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

import msgspec

from .shell_line import DECLARING, TEXT, WORDS, Findings, Opaque, SimpleCommand, Stdin, Target, exported, unknown

Words = tuple[str, ...]
Inner = Callable[[str], None]
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\+?=(.*)", re.S)
_SIMPLE_TEXT = re.compile(r"[\w\s./=:,@%+-]*", re.A)
_FD_RUNS = re.compile(r"-[HIusigaplLF01q]*[xX].|-[HIusigaplLF01q]+[xX]|--exec(-batch)?=", re.S)
MAX_WRAPPERS = 20

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "rbash"})
_FOREIGN_SHELLS = frozenset({"fish", "csh", "tcsh", "elvish", "nu", "pwsh", "powershell"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RUNNERS = _names(  # programs that run others in ways that are not followed
    "ssh mosh parallel su runuser script flock chroot unshare nsenter setpriv systemd-run pkexec run0 at batch strace "
    "ltrace gdb valgrind xvfb-run firejail bwrap proot fakeroot screen tmux expect socat entr rlwrap unbuffer "
    "dbus-run-session start-stop-daemon daemonize cgexec numactl prlimit setarch linux32 linux64 i386 x86_64 catchsegv "
    "proxychains proxychains4 torify torsocks chronic caffeinate sg newgrp capsh toybox"
)
_BUILTINS = _names("source . alias coproc let enable compgen complete compopt bind fc")
_ASSIGNING = frozenset({"read", "mapfile", "readarray", "getopts", "unset", "printf", "wait"})
_MOVING = frozenset({"cd", "pushd", "popd"})


class _Options(msgspec.Struct, frozen=True):
    """The options of a wrapper, which come before the command that it runs."""

    flags: str = ""  # short options without a value
    values: str = ""  # short options with a value
    long_flags: frozenset[str] = frozenset()
    long_values: frozenset[str] = frozenset()
    operands: int = 0  # positional arguments before the command
    assignments: bool = False  # NAME=value before the command
    quiet: str = ""  # short options that only print something
    plain: bool = True  # has no effect of its own


_WRAPPERS = {
    "env": _Options("i0v", "uC", _names("ignore-environment null debug"), _names("unset chdir"), assignments=True),
    "nohup": _Options(),
    "setsid": _Options("cfw", "", _names("ctty fork wait")),
    "timeout": _Options("v", "ks", _names("preserve-status foreground verbose"), _names("kill-after signal"), 1),
    "nice": _Options("", "n", long_values=_names("adjustment")),
    "ionice": _Options("t", "cn", _names("ignore"), _names("class classdata")),
    "chrt": _Options("bfior", "", operands=1),
    "taskset": _Options("c", "", operands=1),
    "stdbuf": _Options("", "ioe", long_values=_names("input output error")),
    "time": _Options("pvaq", "of", _names("portability verbose append quiet"), _names("output format")),
    "command": _Options("p", "", quiet="vV"),
    "builtin": _Options(),
    "exec": _Options("cl", "a"),
    "busybox": _Options(),
    "sudo": _Options("AbBEHknNPS", "CDghpRrtTUu", _names("non-interactive preserve-env stdin background"),
                     _names("user group host prompt chdir"), assignments=True, quiet="lvVKe", plain=False),
    "doas": _Options("n", "Cu", quiet="L", plain=False),
    "xargs": _Options("0rtpxo", "adEILnPs", _names("null no-run-if-empty verbose interactive exit open-tty"),
                      _names("arg-file delimiter max-args max-procs max-chars"), plain=False),
}  # fmt: skip


def note(words: Words, targets: tuple[Target, ...], stdin: Stdin | None, findings: Findings, inner: Inner) -> None:
    """Record a simple command and, if it runs another one, that too."""
    for _ in range(MAX_WRAPPERS):
        name = words[0].rsplit("/", 1)[-1] if words else ""
        if words and (unknown(words[0]) or not name):
            raise Opaque("the name of a command is unknown until it runs")
        noted = len(findings.commands)
        findings.commands.append(SimpleCommand(words, targets))
        if not words:
            return
        options = _WRAPPERS.get(name)
        following: Words = ()
        if options is None:
            wraps = _inspect(name, words[1:], stdin, findings, inner)
        else:
            following = _unwrap(name, words[1:], options, findings)
            wraps = options.plain and bool(following)
        findings.commands[noted] = SimpleCommand(words, targets, wrapper=wraps)
        if not following:
            return
        words, targets = following, ()
    raise Opaque("it is nested too deeply")


def _inspect(name: str, arguments: Words, stdin: Stdin | None, findings: Findings, inner: Inner) -> bool:
    """Inspect a command that is not in the table of wrappers; return whether it only runs a text that is read here.

    Raises `Opaque` for commands that change or run others in ways that cannot be followed.
    """
    if name in _SHELLS:
        return _shell(arguments, stdin, findings, inner)
    if name in _FOREIGN_SHELLS or name in _RUNNERS or fnmatchcase(name, "ld-linux*") or name == "ld.so":
        raise Opaque(f"{name} runs commands that cannot be inspected")
    if name in _BUILTINS and arguments:
        raise Opaque(f"{name} changes or runs commands in a way that cannot be followed")
    if name == "eval":
        inner(_known(" ".join(arguments[arguments[:1] == ("--",) :]), "eval"))
        return True
    if name == "trap":
        return _trap(arguments, inner)
    if name in ("find", "fd", "fdfind"):
        if name != "find" and any(_FD_RUNS.match(word) for word in arguments):
            raise Opaque(f"{name} runs a command that cannot be inspected")
        _find(arguments, findings, inner)
    elif name == "watch":
        _watch(arguments, inner)
    elif name in DECLARING:
        _declare(arguments, findings, exported(name, arguments))
    elif name in _ASSIGNING:
        _assigning(name, arguments, findings)
    elif name in ("test", "[") and ("-v" in arguments or "-R" in arguments):
        if any("[" in word or unknown(word) for word in arguments):
            raise Opaque("it tests an array element whose index is unknown")
    elif name in ("hash", "jobs", "set", "shopt"):
        _shell_settings(name, arguments)
    elif name in _MOVING:
        findings.moves = True
    return False


def _unwrap(name: str, words: Words, options: _Options, findings: Findings) -> Words:
    """Return the command that a wrapper runs; empty if it runs none."""
    place, operands, marker, past = 0, options.operands, "", False
    while place < len(words):
        word = words[place]
        if unknown(word):
            raise Opaque(f"the command that {name} runs is unknown until it runs")
        split = _split_string(word, words[place + 1 :]) if name == "env" and not past else None
        if split is not None:
            words, place = split, 0
        elif not past and word == "--":
            place, past = place + 1, True
        elif not past and ((name, word) == ("env", "-") or (name == "nice" and re.fullmatch(r"-\d+", word))):
            place += 1
        elif not past and word.startswith("--"):
            place += _long(name, word, options)
        elif not past and word.startswith("-") and len(word) > 1:
            taken, stop, found = _cluster(name, word, options)
            if stop:
                return ()
            if name == "xargs" and "I" in word and place + 1 < len(words):
                marker = found or words[place + 1]
            place += taken
        elif options.assignments and "=" in word and (not past or name == "env"):
            variable, _, value = word.partition("=")
            findings.set(variable, value.isdecimal(), exported=True)
            place += 1
        elif operands:
            operands -= 1
            place += 1
        else:
            break
    return _appended(name, words[place:], marker)


def _appended(name: str, words: Words, marker: str) -> Words:
    """Return the command that is run. xargs appends unknown words to it, or inserts them at its marker."""
    if name != "xargs" or not words:
        return words
    if marker:
        return tuple(word.replace(marker, TEXT) for word in words)
    return (*words, WORDS)


def _split_string(word: str, rest: Words) -> Words | None:
    """Split the argument of `env -S` into words; None if the word is no such option."""
    if word in ("-S", "--split-string") and rest:
        text, rest = rest[0], rest[1:]
    elif word.startswith("--split-string="):
        text = word.partition("=")[2]
    elif re.fullmatch(r"-[iv0]*S.*", word, re.S):
        text = word.partition("S")[2]
        if not text:
            text, rest = (rest[0], rest[1:]) if rest else ("", ())
    else:
        return None
    if not _SIMPLE_TEXT.fullmatch(text):
        raise Opaque("env splits a string in a way that cannot be followed")
    return (*text.split(), *rest)


def _long(name: str, word: str, options: _Options) -> int:
    """Return how many words a long option takes. An unknown option may take any number, so it is `Opaque`."""
    option, equals, _ = word[2:].partition("=")
    if option in options.long_values:
        return 1 if equals else 2
    if option not in options.long_flags:
        raise Opaque(f"{name} has an option {word[:40]} of unknown meaning")
    return 1


def _cluster(name: str, word: str, options: _Options) -> tuple[int, bool, str]:
    """Read combined short options: how many words they take, whether nothing is run, an attached value."""
    for number, letter in enumerate(word[1:], 2):
        if letter in options.quiet:
            return 1, True, ""
        if letter in options.values:
            return (1 if word[number:] else 2), False, word[number:]
        if letter not in options.flags:
            raise Opaque(f"{name} has an option {word[:40]} of unknown meaning")
    return 1, False, ""


def _known(text: str, name: str) -> str:
    if unknown(text):
        raise Opaque(f"{name} runs a command text that is unknown until it runs")
    return text


def _shell(arguments: Words, stdin: Stdin | None, findings: Findings, inner: Inner) -> bool:
    """Read a shell's -c text or standard input as a command line; a script file is a program like any other."""
    text_follows, reads, place = False, False, 0
    while place < len(arguments) and arguments[place][:1] in ("-", "+"):
        word = arguments[place]
        place += 1
        if word in ("-", "--"):
            break
        # After an o in the same word, some shells expect a name and others further options.
        if unknown(word) or word.startswith(("--rc", "--init")) or re.match(r"\+.*s|[-+]\w*[oO].", word):
            raise Opaque("a shell has options of unknown meaning")
        if not word.startswith("--"):
            text_follows, reads = text_follows or "c" in word, reads or "s" in word
            place += word.endswith(("o", "O"))
    operands = arguments[place:]
    if text_follows:
        inner(_known(operands[0] if operands else "", "a shell"))
    elif reads or not operands or operands[0] == "/dev/stdin":
        _fed(stdin, inner)
    elif unknown(operands[0]) or operands[0].startswith(("/dev/", "/proc/")):
        raise Opaque("a shell runs a command text that is unknown until it runs")
    else:
        findings.commands.append(SimpleCommand(operands, wrapper=True))  # rules about the script apply here too
        return False
    return True


def _fed(stdin: Stdin | None, inner: Inner) -> None:
    if stdin is None or stdin.text is None:
        raise Opaque("a shell reads commands that are unknown until it runs")
    inner(stdin.text)


def _find(arguments: Words, findings: Findings, inner: Inner) -> None:
    """Read the commands of find's -exec and similar options, and of fd's -x."""
    if WORDS in arguments or sum(word == TEXT for word in arguments) > 1:
        raise Opaque("the arguments of find are unknown until it runs")
    place = 0
    while place < len(arguments):
        word = arguments[place]
        place += 1
        if word in ("-exec", "-execdir", "-ok", "-okdir", "-x", "-X", "--exec", "--exec-batch"):
            end = place
            while end < len(arguments) and arguments[end] != ";" and arguments[end - 1 : end + 1] != ("{}", "+"):
                end += 1
            note(tuple(part.replace("{}", TEXT) for part in arguments[place:end]), (), None, findings, inner)
            place = end + 1


def _watch(arguments: Words, inner: Inner) -> None:
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        word = arguments[place]
        if unknown(word) or word.startswith("--") or not re.fullmatch(r"-[bcCdegptxw]*(n[\d.]*)?", word):
            raise Opaque("watch has an option of unknown meaning")
        place += 2 if word.endswith("n") else 1
    inner(_known(" ".join(arguments[place:]), "watch"))


def _trap(arguments: Words, inner: Inner) -> bool:
    operands = arguments[1:] if arguments[:1] == ("--",) else arguments
    if any(unknown(word) for word in operands):
        raise Opaque("trap runs a command text that is unknown until it runs")
    if len(operands) < 2 or operands[0] in ("-", "-l", "-p", ""):
        return False
    inner(operands[0])
    return True


def _declare(arguments: Words, findings: Findings, exported: bool) -> None:
    for word in arguments:
        if found := _ASSIGNMENT.fullmatch(word):
            findings.set(found[1], found[2].isdecimal(), exported)
        elif exported and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", word):  # it was set before
            findings.set(word, False, exported)
        elif unknown(word) or "[" in word or (word[:1] in "-+" and set(word[1:]) & set("in")):
            raise Opaque("it declares a variable in a way that cannot be followed")


def _assigning(name: str, arguments: Words, findings: Findings) -> None:
    if name == "printf" and not any(word.startswith("-v") or unknown(word[:1]) for word in arguments[:1]):
        return
    if name in ("mapfile", "readarray") and any(word.startswith("-") and "C" in word for word in arguments):
        raise Opaque(f"{name} runs commands that cannot be inspected")
    for word in arguments:
        if "[" in word or (unknown(word) and name != "printf" and name != "wait"):
            raise Opaque(f"{name} sets an unknown variable")
        for found in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", word):
            findings.set(found, False)


def _shell_settings(name: str, arguments: Words) -> None:
    text = " ".join(arguments)
    if name == "hash" and arguments and arguments != ("-r",):
        raise Opaque("hash changes what a name runs")
    if name == "jobs" and arguments:
        raise Opaque("jobs runs a command that cannot be inspected")
    changes = r"extglob|nullglob|keyword|posix|alias|allexport|^-\w*k|(?:^| )-\w*a"
    if unknown(arguments[0] if arguments else "") or re.search(changes, text):
        raise Opaque(f"{name} changes how the line is parsed")
