"""What a run logged of its cells' loads, for the plan's drop model."""

import numpy as np

from argosy import spec
from argosy.plan import drops
from argosy.track.log import RunLog

LAST = 0.25  # of the updates are read: routers change most at the start
NAMES = (
    *(f"moe/cell_load_histogram/bin_{i:02d}" for i in range(drops.BINS)),
    "data/equal_documents_per_shard",
    "moe/sender_drop_fraction",
    "moe/receiver_drop_fraction",
)


def logged(log: RunLog) -> tuple[spec.Run, drops.Logged]:
    """The resolved run, and the loads and drops of the last quarter of its logged updates (16 at least, if there are).

    Raises:
        ValueError: for a run without these metrics, naming the nearest it has, or one that this version cannot read.
    """
    run = spec.from_json(log.run["run"])
    found = [log.series(name) for name in NAMES]
    steps = found[0][0]
    for name, (at, _) in zip(NAMES, found, strict=True):
        if not np.array_equal(at, steps):
            raise ValueError(f"run {log.name!r} logged {name} at other updates than {NAMES[0]}; its log is damaged")
    keep = max(16, round(LAST * len(steps)))
    columns = np.stack([values[-keep:] for _, values in found], 1)
    return run, drops.Logged(columns[:, : drops.BINS], *columns[:, drops.BINS :].T)
