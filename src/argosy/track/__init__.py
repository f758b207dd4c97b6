"""The run store: append-only records of runs, and what reads them. Nothing here imports JAX.

In a notebook, while a run is live or years after:

    >>> import argosy.track
    >>> log = argosy.track.read("pocket")                     # doctest: +SKIP
    >>> steps, loss = log.series("train/cross_entropy_loss")  # doctest: +SKIP
    >>> log.metrics, log.run["run"]["data"]["seq_len"], log.events[-1]  # doctest: +SKIP

`store` writes, `log` reads, `metrics` says what every metric means, `report` prints, `server` shows the live page.
"""

from argosy.track.log import RunLog, read

__all__ = ["RunLog", "read"]
