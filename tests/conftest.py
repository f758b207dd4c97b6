"""The strict world of the tests: eight CPU devices, strict dtypes, no silent rank promotion, warnings are errors."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
# LLVM's optimizer is off: it is half of the time to compile, and the tests compute little.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import jax
import pytest
from beartype import BeartypeConf
from beartype.claw import beartype_package

# Modules that annotate shapes are checked by jaxtyping with beartype (pyproject.toml), all others by beartype alone: it is ten
# times as fast where a function is called a million times.
beartype_package("argosy", conf=BeartypeConf(claw_is_pep526=False, is_pep484_tower=True))

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def pocket():
    """The pocket run, shrunk where a test does not need its size."""
    from argosy.runs import pocket as recipe

    return recipe.run()
