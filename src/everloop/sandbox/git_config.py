"""Which settings of a repository's `config` are safe to take from a command: those that make git run nothing.

The reader is stricter than git's: what it does not understand for certain counts as unsafe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SECTION = re.compile(rb'[ \t]*\[([A-Za-z][A-Za-z0-9-]*)(?:[ \t]+"([^"\\\x00]*)")?\][ \t]*')
_SETTING = re.compile(rb"[ \t]*([A-Za-z][A-Za-z0-9-]*)[ \t]*(?:=[ \t]*([^\\\x00]*))?")
_COMMENT = re.compile(rb"[ \t]*(?:[#;].*)?")
_WORD = rb"[A-Za-z0-9_.,@%+/ -]*"
_REFSPEC = rb"\+?[A-Za-z0-9_./*^-]*(?::[A-Za-z0-9_./*-]*)?"
# Not `ext::…` and other helpers, which run a program, and nothing that begins as an option does.
_URL = (
    rb"(?:(?:https?|ssh|git|file)://(?![-])[^\s\"'\\;#]*|[A-Za-z0-9_.-]+@[A-Za-z0-9][A-Za-z0-9.-]*:[^\s:\"'\\;#-]"
    rb"[^\s:\"'\\;#]*|(?:\.{0,2}/|[A-Za-z0-9_])[^\s:\"'\\;#]*)"
)
_ANY = rb"[^\x00]*"

# section.key, or section.*.key for a section with a name: what its value must look like.
_SAFE: dict[str, bytes] = {
    name: pattern
    for pattern, names in (
        (
            _WORD,
            "core.repositoryformatversion core.filemode core.bare core.logallrefupdates core.symlinks "
            "core.ignorecase core.precomposeunicode core.autocrlf core.eol core.safecrlf core.quotepath "
            "core.abbrev core.sparsecheckout core.sparsecheckoutcone core.compression core.untrackedcache "
            "core.whitespace core.longpaths init.defaultbranch pull.rebase pull.ff push.default "
            "push.autosetupremote push.followtags fetch.prune merge.ff merge.conflictstyle merge.renames "
            "rebase.autostash rebase.autosquash diff.renames diff.algorithm status.showuntrackedfiles "
            "status.short status.branch log.date log.decorate gc.auto gc.autodetach branch.autosetupmerge "
            "branch.autosetuprebase rerere.enabled receive.denycurrentbranch receive.denynonfastforwards "
            "receive.denydeletes extensions.objectformat extensions.refstorage commit.verbose tag.sort "
            "branch.sort feature.manyfiles index.version color.ui advice.detachedhead branch.*.merge "
            "branch.*.rebase remote.*.tagopt remote.*.prune submodule.*.branch submodule.*.ignore "
            "submodule.*.path",
        ),
        (_ANY, "user.name user.email author.name author.email committer.name committer.email branch.*.description"),
        (_REFSPEC, "remote.*.fetch remote.*.push"),
        (_URL, "remote.*.url remote.*.pushurl branch.*.remote branch.*.pushremote submodule.*.url"),
        (
            rb"true|false|",
            "submodule.*.active submodule.active submodule.recurse remote.*.mirror remote.*.skipdefaultupdate",
        ),
        (rb"false", "commit.gpgsign tag.gpgsign"),
        (rb"checkout|merge|rebase|none", "submodule.*.update"),
    )
    for name in names.split()
}


@dataclass(slots=True, frozen=True)
class Setting:
    """One line of a config file: the section as it stands there, the key, and its value as written."""

    section: bytes  # the whole line, to be written again
    name: str  # section.key or section.*.key, in lower case
    title: bytes  # the name of the section, if it has one
    line: bytes
    value: bytes

    @property
    def is_safe(self) -> bool:
        pattern = _SAFE.get(self.name)
        value = self.value
        if len(value) > 1 and value[:1] == value[-1:] == b'"' and b'"' not in value[1:-1]:
            value = value[1:-1]
        return pattern is not None and re.fullmatch(pattern, value) is not None

    @property
    def key(self) -> tuple[str, bytes, bytes]:
        return self.name, self.title, self.value


def settings(data: bytes) -> Iterator[Setting] | None:
    """The settings of a config file; None where it is not understood for certain."""
    found: list[Setting] = []
    section, name, title = b"", "", b""
    for line in data.replace(b"\r\n", b"\n").split(b"\n"):
        if b"\r" in line:
            return None
        if _COMMENT.fullmatch(line):
            continue
        if match := _SECTION.fullmatch(line):
            section, title = line, match[2] or b""
            name = match[1].decode().lower() + (".*" if match[2] is not None else "")
        elif section and (match := _SETTING.fullmatch(line)):
            found.append(
                Setting(section, f"{name}.{match[1].decode().lower()}", title, line, (match[2] or b"").rstrip())
            )
        else:
            return None
    return iter(found)


def unsafe_settings(data: bytes, trusted: bytes | None, *, worktree: bytes = b"") -> list[str]:
    """The names of settings that could make git run a program and are not in the trusted text.

    `worktree` is the one value of core.worktree that is allowed.
    """
    found = settings(data)
    if found is None:
        return ["something that cannot be read for certain"]
    known = {each.key for each in settings(trusted) or ()} if trusted is not None else set()
    bad = [
        each.name
        for each in found
        if not each.is_safe
        and each.key not in known
        and not (each.name == "core.worktree" and worktree and each.value == worktree)
    ]
    return list(dict.fromkeys(bad))


def safe_subset(data: bytes) -> bytes:
    """The safe settings of a config file, in order; an empty repository's own where it cannot be read."""
    found = settings(data)
    if found is None:
        return b"[core]\n\trepositoryformatversion = 0\n"
    lines: list[bytes] = []
    section = b""
    for each in found:
        if each.is_safe:
            if each.section != section:
                lines.append(section := each.section)
            lines.append(each.line)
    return b"".join(line + b"\n" for line in lines)
