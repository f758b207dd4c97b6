"""The processes of one run: how they agree, wait for each other, and tell that one is gone. Alone, all of it is free.

Two ways lead from process to process. What is said before, between and after updates goes through JAX's coordination
service: small JSON, no device, a wait as long as it takes. What is asked at every update is a sum on the devices, read
one update later, so that no device waits for it. Every process makes the calls of this module in the same order.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the service's client has no public name; Orbax reaches for the same one
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

T = TypeVar("T")

LONGEST_MS = 48 * 3600 * 1000  # a corpus may take long to build; a process that died ends every wait much sooner
_turns = itertools.count()


def alone() -> bool:
    """Whether this process is the whole run."""
    return not jax.distributed.is_initialized()


def first() -> bool:
    """Whether this is process 0, which writes the log, the page and what is printed."""
    return alone() or jax.process_index() == 0


def exchange(mine: Any) -> list[Any]:
    """What each process gave here, in the order of processes: anything that JSON holds. Waits for the last of them."""
    if alone():
        return [mine]
    topic, client = f"argosy/{next(_turns)}", distributed.global_state.client
    assert client is not None
    client.key_value_set(f"{topic}/{jax.process_index():08d}", json.dumps(mine))
    client.wait_at_barrier(topic, LONGEST_MS)
    found = sorted(client.key_value_dir_get(f"{topic}/"))
    assert len(found) == jax.process_count(), found
    return [json.loads(value) for _, value in found]


def wait() -> None:
    """Go on when every process is here."""
    exchange(None)


def together(work: Callable[[], T]) -> T:
    """What `work` returns here, once it has returned in every process; if it fails in one, every process says so.

    Raises:
        ValueError, OSError: this process's own, or a ValueError that names the process and says what it said.
    """
    failure, value = None, None
    try:
        value = work()
    except (ValueError, OSError) as error:
        if alone():
            raise
        failure = error
    told = exchange(None if failure is None else _sentence(failure))
    if failure is not None:
        raise failure
    for process, sentence in enumerate(told):
        if sentence is not None:
            raise ValueError(f"process {process} of {len(told)}: {sentence}")
    return value  # type: ignore[return-value]


def on_first(work: Callable[[], T]) -> T:
    """What `work` returns in process 0, in every process: JSON. The others wait, and fail if it fails.

    Raises:
        ValueError, OSError: as `together`.
    """
    return exchange(together(lambda: work() if first() else None))[0]


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error)


def compiled(program: Any, *args: Any) -> Any:
    """A jitted program compiled for arguments of these shapes, once it is so in every process.

    Collectives between CPUs give up on a process that comes 30 s late to their first use; the time to compile differs more.
    """
    ready = program.lower(*args).compile()
    wait()
    return ready


def voting(mesh: Mesh) -> Callable[[bool, bool], tuple[bool, bool]]:
    """A function of this process's wish to stop and, of process 0, to save; it gives what all have agreed on, alike everywhere.

    Alone that is the wish itself. With other processes it is what was wished at the call before (at first, neither):
    each call starts a sum over the mesh's devices and reads the last one, which a finished update has left behind.
    """
    if alone():
        return lambda stop, save: (stop, save)
    rows = NamedSharding(mesh, P(mesh.axis_names, None))
    program = jax.jit(lambda wishes: jnp.max(wishes, axis=0), out_shardings=NamedSharding(mesh, P()))
    pending: jax.Array | None = None

    def vote(stop: bool, save: bool) -> tuple[bool, bool]:
        nonlocal pending
        mine = np.array([stop, save and first()], np.int32)

        def own(index: Any) -> np.ndarray:
            return np.tile(mine, (len(range(*index[0].indices(mesh.size))), 1))

        wishes = jax.make_array_from_callback((mesh.size, 2), rows, own)
        before, pending = pending, program(wishes)
        if before is None:
            return False, False
        agreed = np.asarray(before)
        return bool(agreed[0]), bool(agreed[1])

    return vote
