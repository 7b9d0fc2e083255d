"""`everloop move`: move one owner from a PostgreSQL database to another."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from ..config.sources import DSN, is_dsn
from ..errors import EverloopError
from ..store.tokens import checked_owner
from ..text import counted
from .common import OWNER, load_config


def command(options: argparse.Namespace) -> int:
    if not is_dsn(options.source) or not is_dsn(options.target):
        raise EverloopError("an owner is moved between PostgreSQL databases: name two postgresql:// addresses")
    checked_owner(options.owner)
    config = load_config(options)
    folders = _folders(options.owner, config.home, Path(options.files).expanduser()) if options.files else None
    from ..store.postgres.move_owner import move_owner

    def copy_files() -> None:
        """Before the commits: a copy that fails moves nothing."""
        if folders is not None and folders[0].is_dir():
            try:
                shutil.copytree(*folders, symlinks=True, dirs_exist_ok=True)
            except (OSError, shutil.Error) as error:
                raise EverloopError(f"the workspace cannot be copied ({error}): nothing was moved") from None

    source, target = DSN(options.source), DSN(options.target)
    moved = move_owner(options.owner, source, target, copy_files, lease=config.lease_seconds)
    for table, rows in moved.rows.items():
        print(f"{table:<13} {rows:>9}")
    logs = "the log of 1 session is" if moved.logs == 1 else f"the logs of {moved.logs} sessions are"
    print(
        f"All rows have arrived in {target}, and {logs} the same, entry by entry; work waited for {moved.pause:.1f} s."
    )
    if folders is not None:
        print(f"Files: {folders[0]} is copied to {folders[1]}; the first is still there.")
    if moved.left:
        print(f"{counted(moved.left, 'session')} appeared in {source} meanwhile: run it again.")
    return 1 if moved.left else 0


def _folders(owner: str, home: Path, other: Path) -> tuple[Path, Path]:
    """The owner's folder, with the workspace and its memory, in this home and in another."""
    if owner == OWNER:
        raise EverloopError("--files: the workspace of the owner `me` is your own folder: copy it yourself")
    return home / "owners" / owner, other / "owners" / owner
