"""Checkpoints: Orbax writes them whole or not at all; the newest that restores is the one to go on from."""

import logging
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp


def open_manager(folder: Path, keep: int | None) -> ocp.CheckpointManager:
    """A manager of `<folder>/checkpoints`, which saves in the background and keeps the newest `keep` (all if None)."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save at length
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, step_prefix="step", cleanup_tmp_directories=True)
    return ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)


def latest_step(folder: Path) -> int:
    """Finished updates in the newest checkpoint of a run's folder; 0 without one. Looks at names alone."""
    found = [p.name.removeprefix("step_") for p in (folder / "checkpoints").glob("step_*")]
    return max((int(n) for n in found if n.isdigit()), default=0)


def save(manager: ocp.CheckpointManager, state: Any, step: int) -> None:
    """Start saving a state; an error of the previous save surfaces here.

    Raises:
        OSError: if the disk is full or read-only. Earlier checkpoints stay intact.
    """
    manager.save(step, args=ocp.args.StandardSave(state), force=True)


def restore(manager: ocp.CheckpointManager, like: Any) -> tuple[Any | None, list[str]]:
    """The newest state that restores, or None, and a line for every newer one that did not.

    `like` is a tree of `jax.ShapeDtypeStruct` with shardings: a checkpoint may be restored on another mesh.
    A checkpoint that does not restore (a leaf missing, one too many, a damaged file) is moved to `broken/`, so
    that it neither hides the one before it nor blocks the next save of its step.
    """
    broken: list[str] = []
    while (step := manager.latest_step()) is not None:
        try:
            return manager.restore(step, args=ocp.args.StandardRestore(like)), broken
        except Exception as error:  # Orbax raises whatever its backends raise
            first = (str(error).strip().splitlines() or [""])[0]
            aside = Path(manager.directory).parent / "broken"
            aside.mkdir(exist_ok=True)
            taken = aside / f"step_{step}-{len(list(aside.iterdir()))}"
            (Path(manager.directory) / f"step_{step}").rename(taken)
            manager.reload()
            broken.append(
                f"checkpoint of step {step} does not restore ({type(error).__name__}: {first[:200]}); moved to {taken}"
            )
    return None, broken
