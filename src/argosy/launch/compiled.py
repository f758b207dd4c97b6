"""The collectives of a compiled program, read from its text: for presence and number, not for bytes.

XLA's CPU compiler widens bfloat16 collectives to float32, joins reductions into one operation of many operands, and
drops duplicates; a loop's body appears once. Elements, mesh axes and executions survive all of that.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np


class Found(NamedTuple):
    """One collective's operand. `elements` as in `collectives.Collective`; `executions` are trip counts of its loops."""

    op: str
    axes: tuple[str, ...]
    elements: int
    executions: int


OPS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%\S+ = (.*?) ({OPS})(?:-start)?\((.*)$")
_HEAD = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_CALLED = re.compile(
    r"\b(body|calls|to_apply|branch_computations|true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_SHAPE = re.compile(r"\b[a-z]+\d*\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def collectives(text: str, sizes: dict[str, int]) -> Counter[tuple[Found, str]]:
    """How often each collective stands in a compiled program, with the operation's name in the traced one.

    Loops whose length the compiler does not know count once: `collectives.traced` refuses those that matter.
    """
    bodies, entry = _computations(text)
    found: Counter[tuple[Found, str]] = Counter()

    def visit(name: str, times: int) -> None:
        for line in bodies[name]:
            match = _COLLECTIVE.match(line)
            if match:
                for one in _operands(match[1], match[2], match[3], sizes):
                    if one.axes:
                        found[one._replace(executions=times), _name(line)] += 1
                continue
            trips = _TRIPS.search(line)
            for kind, names in _CALLED.findall(line):
                inner = times * (int(trips[1]) if trips and kind == "body" else 1)
                for called in re.findall(r"%([\w.\-]+)", names):
                    visit(called, inner)

    visit(entry, 1)
    return found


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation that matter, and the name of the first one."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name and (_CALLED.search(line) or _COLLECTIVE.match(line)):
            bodies[name].append(line)
    return bodies, entry


def _name(line: str) -> str:
    match = re.search(r'op_name="([^"]*)"', line)
    return match[1] if match else ""


def _operands(results: str, op: str, rest: str, sizes: dict[str, int]) -> list[Found]:
    group = _group(rest, math.prod(sizes.values()))
    axes = _axes(group, sizes)
    elements = [math.prod(int(n) for n in dims.split(",") if n) for dims in _SHAPE.findall(results)]
    if op == "all-to-all":  # one operand per peer, or one for all of them
        return [Found(op, axes, sum(elements), 1)]
    if op == "reduce-scatter":
        elements = [n * len(group) for n in elements]
    return [Found(op, axes, n, 1) for n in elements]


def _group(rest: str, devices: int) -> list[int]:
    """The devices that the first of an operation's groups joins, from any of the three ways in which they are written."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    if listed:
        return [int(n) for n in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if iota:
        return _iota(iota[2], iota[3], iota[1])[0].ravel().tolist()
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\])?(?:T\(([\d,]+)\))?\))? \{([^}]*)\}", rest
    )
    if named:
        axes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        order = list(axes)
        ids = _iota(named[2] or str(devices), named[3], ",".join(axes.values()))
        over = [order.index(axis) for axis in re.findall(r"'([^']+)'", named[4])]
        return np.moveaxis(ids, over, range(len(over))).reshape(math.prod(ids.shape[i] for i in over), -1)[:, 0].tolist()
    pairs = re.findall(r"\{(\d+),(\d+)\}", rest.split("source_target_pairs=")[-1])
    if "source_target_pairs=" in rest and pairs:
        return sorted({int(n) for pair in pairs for n in pair})
    return list(range(devices))


def _iota(shape: str, order: str | None, then: str) -> np.ndarray:
    """0, 1, 2, ... as `shape`, its dimensions in `order`, as `then`."""
    dims = [int(n) for n in shape.split(",")]
    ids = np.arange(math.prod(dims)).reshape(dims)
    if order:
        ids = ids.transpose([int(n) for n in order.split(",")])
    return ids.reshape([int(n) for n in then.split(",")])


def _axes(group: list[int], sizes: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes along which a group's devices differ."""
    places = np.array(np.unravel_index(np.asarray(group), tuple(sizes.values())))
    return tuple(axis for axis, where in zip(sizes, places, strict=True) if len(set(where.tolist())) > 1)
