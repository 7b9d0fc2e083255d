"""Compiles the tests and the package once, before the workers start.

In a fresh clone, each worker would otherwise compile everything for itself, at the same time as the others.
"""

from __future__ import annotations

import compileall
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from .places import ROOT


def precompile(config: pytest.Config) -> None:
    """Only an optimisation: if something fails here, the workers do it themselves."""
    files = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "src" / "everloop").rglob("*.py")])
    cores = len(os.sched_getaffinity(0))
    children = []
    for number in range(cores):
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                _compile(files[number::cores], config)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _compile(files: Sequence[Path], config: pytest.Config) -> None:
    from _pytest.assertion import rewrite

    state = config.stash[rewrite.assertstate_key]
    for file in files:
        if not (file.name.startswith("test_") or file.name == "conftest.py"):
            compileall.compile_file(file, quiet=2)
            continue
        folder = rewrite.get_cache_dir(file)
        compiled = folder / (file.name[:-3] + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, compiled) is None:
            rewrite.try_makedirs(folder)
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source, compiled)
