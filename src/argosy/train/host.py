"""Arrays that stay in pinned host memory between steps, and visit the device for their update."""

from typing import Any

import jax
from jax.sharding import Sharding


def on_host(x: Any) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetched(tree: Any, after: jax.Array) -> Any:
    """A tree on the device, within `jax.jit`: what lies in host memory is copied there once `after` has been computed.

    Without something to wait for, a scheduler may copy all of it at the start of the step.
    """
    flat, structure = jax.tree.flatten(tree)
    if not any(map(on_host, flat)):
        return tree
    waited, _ = jax.lax.optimization_barrier(([x for x in flat if on_host(x)], after))
    arrived = iter([jax.device_put(x, jax.memory.Space.Device) for x in waited])
    return jax.tree.unflatten(structure, [next(arrived) if on_host(x) else x for x in flat])


def returned(tree: Any, like: Any) -> Any:
    """A tree in the memories of `like`, within `jax.jit`."""
    return jax.tree.map(lambda x, old: jax.device_put(x, jax.memory.Space.Host) if on_host(old) else x, tree, like)


def sharding(where: Sharding, memory: str) -> Sharding:
    """The same division over the mesh in the memory of a choice, `device` or `pinned_host`."""
    return where.with_memory_kind("pinned_host") if memory == "pinned_host" else where
