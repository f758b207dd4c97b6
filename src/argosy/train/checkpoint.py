"""Checkpoints: Orbax writes them whole or not at all; the newest that restores is the one to go on from."""

import contextlib
import errno
import gc
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from argosy import processes


@contextlib.contextmanager
def opened(folder: Path, keep: int | None) -> Iterator[ocp.CheckpointManager]:
    """A manager of `<folder>/checkpoints`, which saves in the background; `keep` of the newest stay, with None it only reads.

    Raises:
        OSError: when leaving, if the last save did not reach the disk.
    """
    for name in ("absl", "orbax"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # Orbax tells every save, and every failure at length
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, step_prefix="step", cleanup_tmp_directories=keep is not None, read_only=keep is None
    )
    _hush()
    manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)
    try:
        yield manager
        finish(manager)
    except BaseException:
        if processes.alone():  # else closing waits for processes that may be gone; this one is about to end as well
            with contextlib.suppress(Exception):  # a save that failed has been told already
                manager.close()
        raise
    manager.close()


def latest_step(folder: Path) -> int:
    """Finished updates in the newest checkpoint of a run's folder; 0 without one. Looks at names alone."""
    found = [p.name.removeprefix("step_") for p in (folder / "checkpoints").glob("step_*")]
    return max((int(n) for n in found if n.isdigit()), default=0)


def save(manager: ocp.CheckpointManager, state: Any, step: int) -> None:
    """Start saving a state; an error of the save before it surfaces here.

    Raises:
        OSError: if the disk is full or read-only. Earlier checkpoints stay intact.
    """
    with _disk(manager):
        manager.save(step, args=ocp.args.StandardSave(state), force=True)


def finish(manager: ocp.CheckpointManager) -> None:
    """Wait until what was saved is on the disk.

    Raises:
        OSError: as `save`.
    """
    with _disk(manager):
        manager.wait_until_finished()


@contextlib.contextmanager
def _disk(manager: ocp.CheckpointManager) -> Iterator[None]:
    """Whatever the backends of Orbax raise when a disk refuses, as an OSError of one line."""
    try:
        yield
    except Exception as error:
        text = str(error)
        full = "RESOURCE_EXHAUSTED" in text or "No space left" in text
        code = errno.ENOSPC if full else getattr(error, "errno", None) or errno.EIO
        why = os.strerror(code) if full else _line(error)
        raise OSError(code, f"checkpoint not written, earlier ones are intact: {why}", str(manager.directory)) from error


def _hush() -> None:
    """Keep Orbax's left-over callbacks from printing a traceback each once its event loop is gone."""
    before, before_in_threads, before_unraisable = sys.excepthook, threading.excepthook, sys.unraisablehook

    def left_over(value: BaseException | None) -> bool:
        return "Event loop is closed" in str(value)

    sys.excepthook = lambda kind, value, trace: None if left_over(value) else before(kind, value, trace)
    threading.excepthook = lambda args: None if left_over(args.exc_value) else before_in_threads(args)
    sys.unraisablehook = lambda args: None if left_over(args.exc_value) else before_unraisable(args)


def _line(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"


def restore(manager: ocp.CheckpointManager, like: Any, *, set_aside: bool) -> tuple[Any | None, list[str]]:
    """The newest state that restores, or None if there are none, and a line for every newer one that did not.

    `like` is a tree of `jax.ShapeDtypeStruct` with shardings: a checkpoint may be restored on another mesh. One that
    does not restore is moved to `broken/` if `set_aside`, so that it does not block the next save of its step.

    With several processes one that restores in all of them is taken, the same in each.

    Raises:
        ValueError: when there are checkpoints and none restores, as when the code changed its parameters; nothing is moved.
    """
    failed: dict[int, str] = {}
    for step in processes.on_first(lambda: sorted(manager.all_steps(), reverse=True)):
        state, why = _read(manager, step, like)
        if bad := next(((n, w) for n, w in enumerate(processes.exchange(why)) if w), None):
            failed[step] = bad[1] if processes.alone() else f"process {bad[0]}: {bad[1]}"
            continue
        lines = [f"checkpoint of step {s:,} does not restore ({why}); went on from step {step:,}" for s, why in failed.items()]
        if set_aside and failed:
            processes.on_first(lambda: _set_aside(manager, list(failed)))
            manager.reload()
        return state, lines
    if failed:
        told = "; ".join(f"step {s:,}: {why}" for s, why in failed.items())
        raise ValueError(
            f"none of the checkpoints in {manager.directory} restores into this run with this code: {told};"
            " go on with the code that wrote them, or move the folder away to begin again from the seed"
        )
    return None, []


def _read(manager: ocp.CheckpointManager, step: int, like: Any) -> tuple[Any | None, str | None]:
    """This process's part of a checkpoint, or why it does not restore.

    The handler alone, without the manager around it, which would leave the other processes waiting where one fails.
    """
    told = logging.getLogger("asyncio")
    level = told.level
    with warnings.catch_warnings():
        # Where one array fails Orbax forgets the reads of the others, which complain when they are collected.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        told.setLevel(logging.CRITICAL)
        try:
            folder = Path(manager.directory) / f"step_{step}" / "default"
            return ocp.StandardCheckpointHandler().restore(folder, args=ocp.args.StandardRestore(like)), None
        except Exception as error:  # Orbax raises whatever its backends raise
            why = _why(error)
        finally:
            gc.collect()
            told.setLevel(level)
    return None, why


def _why(error: Exception) -> str:
    """Why a checkpoint does not restore: files that are not whole any more in plain words, all else as Orbax says it."""
    text = str(error)
    if isinstance(error, json.JSONDecodeError) or "OUT_OF_RANGE" in text or "DATA_LOSS" in text:
        return "a file of it is cut short or overwritten"
    if "NOT_FOUND" in text:
        return "a file of it is missing"
    if "error while reading array" in text:
        return "an array of it cannot be read: a file of it is missing, cut short or overwritten"
    return _line(error)


def _set_aside(manager: ocp.CheckpointManager, steps: list[int]) -> None:
    aside = Path(manager.directory).parent / "broken"
    aside.mkdir(exist_ok=True)
    for step in steps:
        (Path(manager.directory) / f"step_{step}").rename(aside / f"step_{step}-{len(list(aside.iterdir()))}")
