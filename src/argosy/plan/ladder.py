"""The scaling ladder: small runs of the hero's recipe, from which the hero is forecast."""

from typing import NamedTuple

from argosy import spec


class Rung(NamedTuple):
    """One run of a ladder.

    `name` is unique within its ladder and a plain folder name ("d64", "d64-small-batch", "d64-seed1"); `purpose` is `size`, `small_batch`
    (a size again with a smaller batch: tells updates from tokens apart) or `seed` (a size again with another seed: tells luck).
    """

    name: str
    run: spec.Run
    purpose: str
