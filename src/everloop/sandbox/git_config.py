"""The git settings that a command may write: an allow-list of those that cannot make git execute a program.

The parser is stricter than git's: whatever it does not understand with certainty counts as unsafe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_SECTION = re.compile(rb'[ \t]*\[([A-Za-z][A-Za-z0-9-]*)(?:[ \t]+"([^"\\\x00]*)")?\][ \t]*')
_SETTING = re.compile(rb"[ \t]*([A-Za-z][A-Za-z0-9-]*)[ \t]*(?:=[ \t]*([^\\\x00]*))?")
_COMMENT = re.compile(rb"[ \t]*(?:[#;].*)?")
_WORD = rb"[A-Za-z0-9_.,@%+/ -]*"
_REFSPEC = rb"\+?[A-Za-z0-9_./*^-]*(?::[A-Za-z0-9_./*-]*)?"
# No `ext::…` or other transport helpers, which execute programs, and nothing that looks like an option.
_URL = (
    rb"(?:(?:https?|ssh|git|file)://(?![-])[^\s\"'\\;#]*|[A-Za-z0-9_.-]+@[A-Za-z0-9][A-Za-z0-9.-]*:[^\s:\"'\\;#-]"
    rb"[^\s:\"'\\;#]*|(?:\.{0,2}/|[A-Za-z0-9_])[^\s:\"'\\;#]*)"
)
_ANY = rb"[^\x00]*"

# section.key (section.*.key if the section has a subsection): the pattern of allowed values.
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


class Setting(msgspec.Struct, frozen=True):
    """One setting of a config file."""

    section: bytes  # the header line, verbatim
    name: str  # section.key or section.*.key, in lower case
    title: bytes  # the subsection, if any
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
    """Parse a config file; return None if any of it is not understood with certainty."""
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
    """Return the names of settings that are not allow-listed and not in the trusted text.

    `worktree` is the only allowed value of core.worktree.
    """
    found = settings(data)
    if found is None:
        return ["unusual syntax"]
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
    """Return a config file reduced to its allow-listed settings; a minimal one if it cannot be parsed."""
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
