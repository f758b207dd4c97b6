"""Weights applied to every position, against numpy float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from argosy import mesh, spec
from argosy.model.linear import linear, linears

MESHES = {
    "one": [],
    "eight": ["mesh.data=2", "mesh.expert=4", "routing.exchange=dense"],
    "divided sequences": ["mesh.data=2", "mesh.context=2", "mesh.expert=2", "routing.exchange=dense"],
}


@pytest.mark.parametrize("name", MESHES)
def test_products_and_gradients(pocket, name):
    """Fails when a product, a gradient or its sharding departs from x w, alone or joined with others."""
    run = spec.override(pocket, MESHES[name])
    rng = np.random.default_rng(0)
    x64, ct64 = rng.normal(size=(8, 6, 16)), rng.normal(size=(8, 6, 32))
    w64 = [rng.normal(size=(16, n)) for n in (32, 8, 4)]
    m = mesh.make(run)
    with jax.set_mesh(m):
        put = lambda value, where: jax.device_put(jnp.asarray(value, jnp.float32), NamedSharding(m, where))  # noqa: E731
        x, ct, w = put(x64, mesh.B_S_D), put(ct64, mesh.B_S_D), [put(v, P(mesh.FSDP, None)) for v in w64]

        def total(x, w):
            y, (z, *others) = linear(x, w[0]), linears(x, w)
            return jnp.sum(y * ct) + 2 * jnp.sum(z * ct) + sum(jnp.sum(o * o) for o in others), (y, z, *others)

        (dx, dw), ys = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, w)
    for y, want in zip(ys, (w64[0], *w64), strict=True):
        np.testing.assert_allclose(y, x64 @ want, rtol=1e-5, atol=1e-5)
        assert y.sharding.spec == mesh.B_S_D
    cts = [3 * ct64, *(2 * x64 @ v for v in w64[1:])]
    np.testing.assert_allclose(dx, sum(c @ v.T for c, v in zip(cts, w64, strict=True)), rtol=1e-4, atol=1e-4)
    for found, c in zip(dw, cts, strict=True):
        np.testing.assert_allclose(found, np.einsum("bsi,bso->io", x64, c), rtol=1e-4, atol=1e-4)
        assert found.sharding.spec == P(mesh.FSDP, None)


def test_operands_are_in_the_dtype_of_the_input(pocket):
    """Fails when a float32 weight drags a bf16 product to float32, or its gradient loses the weight's dtype."""
    m = mesh.make(pocket)
    with jax.set_mesh(m):
        x = jax.device_put(jnp.ones((8, 2, 4), jnp.bfloat16), NamedSharding(m, mesh.B_S_D))
        w = jax.device_put(jnp.full((4, 3), 1 + 2**-10, jnp.float32), NamedSharding(m, P(mesh.FSDP, None)))
        y = jax.jit(linear)(x, w)
        dw = jax.jit(jax.grad(lambda w: jnp.sum(linear(x, w).astype(jnp.float32))))(w)
    assert y.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    np.testing.assert_array_equal(y.astype(jnp.float32), 4.0)  # the weight was rounded before the product
    np.testing.assert_array_equal(dw, 16.0)


@pytest.mark.parametrize("parts", [P(mesh.FSDP, None), P(None, mesh.FSDP)])
def test_gradient_of_a_divided_weight_is_scattered_and_only_its_parts_summed(pocket, parts):
    """Fails when a device receives the summed gradient of what it does not keep."""
    run = spec.override(pocket, ["mesh.replica=2", "mesh.data=2", "mesh.expert=2", "routing.exchange=dense"])
    devices = mesh.make(run)
    with jax.set_mesh(devices):
        x = jax.ShapeDtypeStruct((8, 4, 16), jnp.bfloat16, sharding=NamedSharding(devices, mesh.B_S_D))
        w = jax.ShapeDtypeStruct((16, 12), jnp.float32, sharding=NamedSharding(devices, parts))
        text = jax.jit(jax.grad(lambda w, x: jnp.sum(linear(x, w)))).trace(w, x).lower().compile().as_text()
    found = [(match[2], match[1]) for match in re.finditer(r"= \w+\[([\d,]+)\]\S* (all-\w+|reduce-scatter)\(", text)]
    local = NamedSharding(devices, parts).shard_shape((16, 12))
    assert found == [("reduce-scatter", f"{local[0]},{local[1]}"), ("all-reduce", f"{local[0]},{local[1]}")]
