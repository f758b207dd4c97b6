"""What a traced program is made of, and a quicker way to compile one."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax

# XLA's emitters of fusions on a CPU take 40% of the time to compile. Not for two programs that must agree to the bit.
jit = partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": False})


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of the programs inside it too."""
    for one in jaxpr.eqns:
        yield one
        for value in one.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
