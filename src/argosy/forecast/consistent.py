"""Whether the rows of one run agree with each other, and tables in which they do.

A run has one size; its batch and its horizon may change, which is told. Finished models that share a run's name are taken apart.
Parameters that a row lacks and its run has are filled in; a size is what all rows have, active parameters before total ones.
"""

import dataclasses

import numpy as np

from argosy.forecast.points import Table, take

SAME = 1e-6  # relative: figures that differ by less are one
SIZES = ("active_params", "total_params")

Remark = tuple[str, str]  # an alarm's code and message


def tidied(points: Table, target: Table) -> tuple[Table, Table, list[Remark]]:
    """Both tables as they are fitted, and what was found in them.

    Raises:
        ValueError: for parameters that change within a run, for a batch that changes where tokens are not given, and for trained rows
            without tokens or FLOPs.
    """
    remarks: list[Remark] = []
    for what, table in (("POINTS", points), ("TARGET", target)):
        trained(table, what)
        changes(table, what, remarks)
    start = untrained(points)
    if start.any():
        remarks.append(
            ("untrained_rows", f"{int(start.sum())} rows of POINTS are from before the first update and are left out")
        )
        points = take(points, np.flatnonzero(~start))
    points, target = filled(points), filled(target)
    known = [[~np.isnan(getattr(table, name)) for table in (points, target)] for name in SIZES]
    active, total = (np.concatenate(columns) for columns in known)
    if active.any() and not active.all() and (total & ~active).any():
        everywhere = bool(total.all())
        remarks.append(
            (
                "mixed_params",
                f"active_params are given in {int(active.sum())} of {len(active)} rows of both tables; "
                + (
                    "total_params, which all have, stand for the size"
                    if everywhere
                    else "total_params stand for them in the others"
                ),
            )
        )
        if everywhere:
            points, target = (dataclasses.replace(t, active_params=np.full(len(t), np.nan)) for t in (points, target))
    return apart(points), apart(target), remarks


def untrained(table: Table) -> np.ndarray:
    """Which rows come before the first update."""
    return (table.step == 0) | (np.isnan(table.step) & ((table.tokens == 0) | (table.flops == 0)))


def trained(table: Table, what: str) -> None:
    """Raises ValueError for a row with updates and without tokens or FLOPs."""
    for name in ("tokens", "flops"):
        bad = np.flatnonzero((table.step > 0) & (getattr(table, name) == 0))
        if bad.size:
            i = int(bad[0])
            raise ValueError(
                f"{what} row {i + 1} ({table.run[i]}): {name} is 0 after {table.step[i]:g} updates; leave the cell empty"
            )


def finished(table: Table, own: np.ndarray) -> bool:
    """Whether all rows of a run are ends of runs: without steps, or at their last."""
    step, total = table.step[own], table.steps_total[own]
    return bool((np.isnan(step) | (step >= total * (1 - SAME))).all())


def runs(table: Table) -> dict[str, np.ndarray]:
    """Each run's rows, by step."""
    names = np.array(table.run)
    listed = {run: np.flatnonzero(names == run) for run in dict.fromkeys(table.run)}
    return {run: own[np.argsort(table.step[own], kind="stable")] for run, own in listed.items()}


def changes(table: Table, what: str, remarks: list[Remark]) -> None:
    """Adds remarks on batch and horizon of runs in which they change.

    Raises:
        ValueError: see `tidied`.
    """
    for run, own in runs(table).items():
        if finished(table, own):
            continue
        for name in (*SIZES, "steps_total", "tokens_per_step"):
            column = getattr(table, name)
            there = own[~np.isnan(column[own])]
            jumps = np.flatnonzero(np.abs(np.diff(column[there])) > SAME * column[there][:-1])
            if not jumps.size:
                continue
            a, b = there[jumps[0]], there[jumps[0] + 1]
            how = f"{what} {run}: {name} goes from {column[a]:.10g} at step {table.step[a]:g} to {column[b]:.10g} at step {table.step[b]:g}"
            if name in SIZES:
                raise ValueError(f"{how}; a run has one size. Give each model a run name of its own")
            if name == "tokens_per_step" and np.isnan(table.tokens[own]).any():
                raise ValueError(
                    f"{how}, and tokens are not given in every row; with a batch that changes, fill in cumulative tokens"
                )
            code, then = (
                ("steps_total_changes", "fractions of the run are each row's own")
                if name == "steps_total"
                else ("batch_changes", "tokens are taken as given, and updates count as updates")
            )
            remarks.append((code, f"{how}; {then}"))


def filled(table: Table) -> Table:
    """The table with a run's parameters in those of its rows that lack them, where its other rows agree."""
    columns = {}
    for name in SIZES:
        column = getattr(table, name).copy()
        for own in runs(table).values():
            known = column[own][~np.isnan(column[own])]
            if known.size and np.ptp(known) <= SAME * known.max():
                column[own] = np.where(np.isnan(column[own]), known[0], column[own])
        columns[name] = column
    return dataclasses.replace(table, **columns)


def apart(table: Table) -> Table:
    """The table with finished models of several sizes or lengths under one name as runs of their own."""
    names = list(table.run)
    for run, own in runs(table).items():
        keys = [tuple(f"{getattr(table, name)[i]:.6g}" for name in (*SIZES, "steps_total")) for i in own]
        if len(set(keys)) > 1 and finished(table, own):
            for i, key in zip(own, keys, strict=True):
                names[i] = " ".join((run, *(k for k in key if k != "nan")))
    return dataclasses.replace(table, run=tuple(names))
