"""Every collective of a traced program: operation, mesh axes, phase, executions and size by the program's own dtypes.

With explicit sharding a collective is either written (`psum`, `all_to_all`, ... inside `shard_map`) or follows from the
shardings of an operation's operands and result: a changed sharding, a sum over a divided dimension, a product that
contracts one. Both are read from the jaxpr, which knows dtypes and loop lengths exactly.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

import argosy

Phase = Literal["forward", "recomputation", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "recomputation", "backward", "optimizer")
_HOME = str(Path(argosy.__file__).parent)


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as often as it runs in a step.

    `elements` are those of the operation's whole side on one device: what is given to an all-to-all, an all-reduce or
    a reduce-scatter, what comes out of an all-gather; of a ragged all-to-all the most that can travel. `axes` are the mesh axes it goes over, outer to inner, those of
    size 1 left out. `source` is the line of Argosy that asks for it.
    """

    op: str
    axes: tuple[str, ...]
    phase: Phase
    executions: int
    elements: int
    dtype: str
    source: str

    @property
    def bytes(self) -> int:
        """Bytes of one execution on one device."""
        return self.elements * _bytes(self.dtype)


def _bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else max(1, np.dtype(dtype).itemsize)


@dataclass(frozen=True)
class _Place:
    """Where the walk is: what encloses an equation."""

    sizes: dict[str, int]
    executions: int
    phase: Phase | None
    manual: bool  # inside shard_map
    source: str


_WRITTEN = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}
_SUMS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
_WHOLE_SIDE_IS_RESULT = {"all-gather"}


def traced(jaxpr: Any, sizes: dict[str, int]) -> list[Collective]:
    """All collectives of a traced program (a jaxpr) on a mesh of these axis sizes, in program order.

    Phases come from the name stacks that differentiation and recomputation leave. Raises `ValueError` for a collective
    in a loop of unknown length, whose executions nobody can count.
    """
    return list(_walk(jaxpr, _Place(sizes, 1, None, False, "")))


def _walk(jaxpr: Any, at: _Place) -> Iterator[Collective]:
    phases = _phases(jaxpr.eqns, at.phase)
    for eqn, phase in zip(jaxpr.eqns, phases, strict=True):
        name, source = eqn.primitive.name, _source(eqn) or at.source
        here = _Place(at.sizes, at.executions, phase, at.manual, source)
        inner = list(_inner(eqn))
        if inner:
            times = eqn.params["length"] if name == "scan" else 1
            manual = at.manual or name == "shard_map"
            below = _Place(at.sizes, at.executions * times, phase, manual, source)
            for sub in inner:
                found = list(_walk(sub, below))
                if found and name == "while":
                    raise ValueError(f"{source or name}: {found[0].op} in a loop of unknown length: it cannot be counted")
                yield from found
        elif name in _WRITTEN:
            yield from _written(eqn, here)
        elif not at.manual:
            yield from _implied(eqn, here)


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation calls."""
    for value in eqn.params.values():
        for one in value if isinstance(value, list | tuple) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def _phases(eqns: list[Any], outer: Phase | None) -> list[Phase | None]:
    """The phase of each equation: by its name stack, else by its place among its neighbours, else its caller's."""
    marked = [_mark(str(eqn.source_info.name_stack)) for eqn in eqns]
    if outer is not None:
        return [mark or outer for mark in marked]
    back = [i for i, mark in enumerate(marked) if mark in ("backward", "recomputation")]
    if not back:  # what calls the whole step, or accumulates over the parts of a batch and then updates
        whole = [i for i, eqn in enumerate(eqns) if _differentiates(eqn)]
        return [None if not whole or i <= whole[-1] else "optimizer" for i in range(len(eqns))]

    def placed(i: int) -> Phase:
        if i > back[-1]:
            return "optimizer"
        return "forward" if i < back[0] else "backward"

    return [mark or placed(i) for i, mark in enumerate(marked)]


def _differentiates(eqn: Any) -> bool:
    """Whether a backward pass is somewhere in what an equation calls."""
    return any(
        _mark(str(e.source_info.name_stack)) == "backward" or _differentiates(e) for sub in _inner(eqn) for e in sub.eqns
    )


def _mark(stack: str) -> Phase | None:
    if "rematted_computation" in stack:
        return "recomputation"
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else None


def _source(eqn: Any) -> str:
    """`model/router.py:230 crossing`: the innermost line of Argosy that made an equation."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if frame.file_name.startswith(_HOME):
            return f"{frame.file_name[len(_HOME) + 1 :]}:{frame.line_num} {frame.function_name}"
    return ""


# ---- written and implied collectives -------------------------------------------------------------


def _real(axes: Iterable[Any], sizes: dict[str, int]) -> tuple[str, ...]:
    """Axis names that divide anything, in the mesh's order."""
    named = set(axes)
    return tuple(axis for axis in sizes if axis in named and sizes[axis] > 1)


def _written(eqn: Any, at: _Place) -> Iterator[Collective]:
    op = _WRITTEN[eqn.primitive.name]
    asked = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = _real((asked,) if isinstance(asked, str) else asked, at.sizes)
    if not axes:
        return
    if op == "ragged-all-to-all":  # rows into a buffer: at most the smaller of the two travels
        sizes = [math.prod(v.aval.shape) for v in eqn.invars[:2]]
        yield _collective(op, axes, at, min(sizes), eqn.invars[0].aval)
        return
    for before, after in zip(eqn.invars, eqn.outvars, strict=False):
        aval = (after if op in _WHOLE_SIDE_IS_RESULT else before).aval
        yield _collective(op, axes, at, math.prod(aval.shape), aval)


def _collective(op: str, axes: tuple[str, ...], at: _Place, elements: int, aval: Any) -> Collective:
    return Collective(op, axes, at.phase or "forward", at.executions, elements, str(aval.dtype), at.source)


def _dims(aval: Any, sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """The axes that divide each dimension of a value."""
    spec = getattr(getattr(aval, "sharding", None), "spec", None) or ()
    dims = [() if part is None else _real((part,) if isinstance(part, str) else part, sizes) for part in spec]
    return dims + [()] * (len(getattr(aval, "shape", ())) - len(dims))


def _local(aval: Any, sizes: dict[str, int]) -> int:
    """Elements of a value that one device holds."""
    return math.prod(aval.shape) // math.prod(sizes[axis] for dim in _dims(aval, sizes) for axis in dim)


def _implied(eqn: Any, at: _Place) -> Iterator[Collective]:
    """What follows from the shardings of an operation outside `shard_map`."""
    name, sizes = eqn.primitive.name, at.sizes
    result = eqn.outvars[0].aval if eqn.outvars else None
    if result is None or not hasattr(result, "shape"):
        return
    if name in _SUMS:
        dims = _dims(eqn.invars[0].aval, sizes)
        over = _real((axis for d in eqn.params["axes"] for axis in dims[d]), sizes)
        if over:
            yield _collective("all-reduce", over, at, _local(result, sizes), result)
        return
    if name == "dot_general":
        (left, right), _ = eqn.params["dimension_numbers"]
        pairs = ((eqn.invars[0].aval, left), (eqn.invars[1].aval, right))
        over = _real((axis for aval, dims in pairs for d in dims for axis in _dims(aval, sizes)[d]), sizes)
        if over:
            yield _collective("all-reduce", over, at, _local(result, sizes), result)
        return
    paired = 1 < len(eqn.outvars) == len(eqn.invars)  # a barrier, a sort of several
    for i, operand in enumerate(eqn.invars):
        if hasattr(operand.aval, "shape"):
            yield from _moved(name, operand.aval, eqn.outvars[i].aval if paired else result, at)


def _moved(name: str, before: Any, result: Any, at: _Place) -> Iterator[Collective]:
    """A changed sharding: axes that are gone are gathered, axes that divide another dimension are exchanged."""
    sizes, dims = at.sizes, _dims(before, at.sizes)
    after = {axis for dim in _dims(result, sizes) for axis in dim}
    lost = _real((axis for dim in dims for axis in dim if axis not in after), sizes)
    local = _local(before, sizes)
    if lost:
        local *= math.prod(sizes[axis] for axis in lost)
        yield _collective("all-gather", lost, at, local, before)
    if name == "reshard":
        then = _dims(result, sizes)
        moved = _real((axis for i, dim in enumerate(dims) for axis in dim if axis in after and axis not in then[i]), sizes)
        if moved:
            yield _collective("all-to-all", moved, at, local, before)
