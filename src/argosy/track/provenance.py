"""Which code and which machine a run was made with."""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

import argosy


def code() -> dict[str, Any]:
    """The code version: `argosy`, `sources` (a checksum of the package's files) and, in a checkout, `commit` and `dirty`."""
    found: dict[str, Any] = {"argosy": argosy.__version__, "sources": _sources()}
    root = Path(argosy.__file__).resolve().parents[2]
    if (root / ".git").exists():
        commit, changed = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
        if commit is not None:
            found |= {"commit": commit.strip(), "dirty": bool(changed)}
    return found


@functools.cache
def _sources() -> str:
    """SHA-256 over the package's Python files, 16 hex digits: equal for a checkout and its wheel."""
    root = Path(argosy.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def packages(*names: str) -> dict[str, str]:
    """The installed versions of the named distributions, those that are there; of all without names."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in sorted(found, key=str.lower) if not names or name in names}


def environment() -> dict[str, Any]:
    """Python, machine, and the version of every installed package."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": packages(),
    }
