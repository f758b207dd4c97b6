"""The reference run and its four rungs (to be filled)."""

from argosy import spec


def run() -> spec.Run:
    raise NotImplementedError


def ragged() -> spec.Run:
    raise NotImplementedError


def rung(width: int) -> spec.Run:
    raise NotImplementedError
