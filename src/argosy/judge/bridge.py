"""A change of the hero does not end its forecast: the change's effect, measured on rungs, shifts and widens the bands."""

from argosy.judge.register import Body


def applied(forecast: Body, bridge: Body | None) -> Body:
    """A forecast with a bridge's shift; without one, as it is."""
    if bridge is None:
        return forecast
    raise NotImplementedError
