"""Attention: the layer against numpy float64 from reference_run 1.2, the blocked form against the plain one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from argosy import leaf, mesh, spec
from argosy.model import attention
from argosy.model.attend import attend, attend_plain

EIGHT = ["mesh.data=2", "mesh.expert=4", "routing.exchange=dense"]
SMALL = ["model.width=24", "model.head_width=8", "model.window=6", "compute.attention_block=8"]
B, S = 8, 20


# ---- the layer ----------------------------------------------------------------------------------


def unit(x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)


def turned(x, t, theta, pairs):
    y = x.copy()
    for i in range(pairs):
        angle = t * theta ** (-i / pairs)
        y[2 * i] = x[2 * i] * np.cos(angle) - x[2 * i + 1] * np.sin(angle)
        y[2 * i + 1] = x[2 * i] * np.sin(angle) + x[2 * i + 1] * np.cos(angle)
    return y


def reference(p, x, doc_start, is_global, m):
    """One layer's attention, query by query, in float64."""
    out = np.zeros_like(x)
    a = m.head_width
    kv_heads = m.kv_heads_global if is_global else m.kv_heads_local
    rotary = m.position == "rope_all" or (m.position == "rope_local" and not is_global)
    for b in range(x.shape[0]):
        q, k, v = x[b] @ p.q, x[b] @ p.k, x[b] @ p.v
        if m.convolution != "none":
            mixed = np.zeros_like(k)
            for t in range(len(k)):
                for lag in range(m.conv_taps):
                    if t - lag >= doc_start[b, t]:
                        mixed[t] += p.conv_k[lag] * k[t - lag]
            k = mixed
        q, k, v = (z.reshape(len(z), -1, a) for z in (q, k, v))
        q, k = unit(q), unit(k)
        if rotary:
            q, k = (np.array([[turned(h, t, m.rope_theta, a // 4) for h in z[t]] for t in range(len(z))]) for z in (q, k))
        q = m.qk_mult * q
        for t in range(len(q)):
            low = doc_start[b, t] if is_global else max(doc_start[b, t], t - m.window + 1)
            heads = []
            for h in range(m.heads):
                n = h // (m.heads // kv_heads)
                score = k[low : t + 1, n] @ q[t, h] / np.sqrt(a)
                weight = np.exp(score - score.max())
                y = (weight / weight.sum()) @ v[low : t + 1, n]
                if m.attention == "exclusive":
                    own = v[t, n]
                    y = y - (y @ own) / (own @ own + 1e-6) * own
                if m.head_gate == "sigmoid":
                    y = 2 / (1 + np.exp(-(x[b, t] @ p.head_gate[:, h]))) * y
                heads.append(y)
            out[b, t] = np.concatenate(heads) @ p.o
    return out


def documents(b, s, longest, seed=0):
    """Starts of documents of 1 to `longest` tokens, different in each sequence."""
    rng = np.random.default_rng(seed)
    starts = np.zeros((b, s), np.int32)
    for row in starts:
        edges = np.cumsum(rng.integers(1, longest + 1, s))
        row[:] = [max([0, *edges[edges <= t]]) for t in range(s)]
    return starts


def draw(run, seed=0):
    """Float64 parameters of one layer, of a size that makes every part matter, and an input."""
    rng = np.random.default_rng(seed)
    values = leaf.tree_map(lambda x: rng.normal(size=x.shape) / x.shape[0] ** 0.5, attention.leaves(run))
    return values, rng.normal(size=(B, S, run.model.width))


def place(run, value, where, dtype=None):
    return jax.device_put(jnp.asarray(value, dtype), NamedSharding(mesh.make(run), where))


def placed(run, p, x, first, dtype=jnp.float32):
    p = leaf.tree_map(lambda declared, value: place(run, value, declared.spec, dtype), attention.leaves(run), p)
    return p, place(run, x, mesh.B_S_D, dtype), place(run, first, mesh.B_S)


CASES = {
    "reference": [],
    "plain": ["model.position=none", "model.attention=plain", "model.head_gate=none", "model.convolution=none"],
    "uneven": ["model.heads=6", "model.kv_heads_local=3", "model.kv_heads_global=2", "model.position=rope_all"],
    "eight": EIGHT,
    "divided sequences": ["mesh.data=2", "mesh.context=2", "mesh.expert=2", "routing.exchange=dense", "data.seq_len=20"],
}


@pytest.mark.parametrize("case", CASES)
def test_layer_follows_the_formula(pocket, case):
    """Fails when a local or a global layer departs from the formula in value, for any named choice or mesh."""
    run = spec.override(pocket, SMALL + CASES[case])
    p64, x64 = draw(run)
    first = documents(B, S, 9)
    with jax.set_mesh(mesh.make(run)):
        f = jax.jit(lambda p, x, first, g: attention.attention(p, x, first, g, run))
        for is_global in (False, True):
            y = f(*placed(run, p64, x64, first), jnp.array(is_global))
            np.testing.assert_allclose(y, reference(p64, x64, first, is_global, run.model), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", ["reference", "eight"])
def test_layer_gradients_follow_the_formula(pocket, case):
    """Fails when the gradient of any parameter or of the input departs from a float64 finite difference."""
    run = spec.override(pocket, SMALL + CASES[case])
    p64, x64 = draw(run)
    first = documents(B, S, 9)
    weight = np.random.default_rng(1).normal(size=x64.shape)
    with jax.set_mesh(mesh.make(run)):
        p, x, starts = placed(run, p64, x64, first)
        ct = place(run, weight, mesh.B_S_D, jnp.float32)
        total = lambda p, x, is_global: jnp.sum(attention.attention(p, x, starts, is_global, run) * ct)  # noqa: E731
        gradient = jax.jit(jax.grad(total, (0, 1)))
        grads = [gradient(p, x, jnp.array(is_global)) for is_global in (False, True)]
    values = [*p64, x64]
    for is_global, (of_p, of_x) in zip((False, True), grads, strict=True):
        for i, found in enumerate([*of_p, of_x]):
            along = np.random.default_rng(i).normal(size=values[i].shape)
            ends = [[*values[:i], values[i] + e * along, *values[i + 1 :]] for e in (1e-6, -1e-6)]
            up, down = (
                np.sum(weight * reference(attention.Attention(*v[:-1]), v[-1], first, is_global, run.model)) for v in ends
            )
            slope = (up - down) / 2e-6
            assert np.sum(np.asarray(found, np.float64) * along) == pytest.approx(slope, rel=5e-4, abs=5e-3), (is_global, i)


def test_local_equals_global_when_the_window_covers_the_sequence(pocket):
    """Fails when a local layer differs from a global one by more than window, rotation and heads."""
    same = ["model.kv_heads_global=2", "model.position=rope_all", f"model.window={S}"]
    run = spec.override(pocket, SMALL + same)
    short = spec.override(run, [f"model.window={S - 1}"])
    p64, x64 = draw(run)
    with jax.set_mesh(mesh.make(run)):
        args = placed(run, p64, x64, np.zeros((B, S), np.int32))
        layer, layer_short = (jax.jit(lambda *a, r=r: attention.attention(*a, r)) for r in (run, short))
        local, whole = layer(*args, jnp.array(False)), layer(*args, jnp.array(True))
        np.testing.assert_array_equal(local, whole)
        narrow = layer_short(*args, jnp.array(False))
    np.testing.assert_array_equal(narrow[:, :-1], whole[:, :-1])
    assert np.all(np.any(np.asarray(narrow[:, -1] != whole[:, -1]), -1))  # only the last query's window falls short


@pytest.mark.parametrize("block", [8, 2, 64], ids=["unrolled", "looped", "one block"])
def test_a_document_does_not_see_its_neighbours(pocket, block):
    """Fails when changing one document changes a bit of another's outputs or gradients."""
    run = spec.override(pocket, [*SMALL, f"compute.attention_block={block}"])
    p64, x64 = draw(run)
    other = x64.copy()
    other[:, 5:13] = 30 * np.random.default_rng(3).normal(size=(B, 8, run.model.width))
    first = np.where(np.arange(S) < 5, 0, np.where(np.arange(S) < 13, 5, 13))[None].repeat(B, 0).astype(np.int32)
    with jax.set_mesh(mesh.make(run)):
        p, a, starts = placed(run, p64, x64, first)
        b = place(run, other, mesh.B_S_D, jnp.float32)

        def total(x, is_global):
            y = attention.attention(p, x, starts, is_global, run)
            return jnp.sum(jnp.sin(y)), y

        f = jax.jit(jax.grad(total, has_aux=True))
        for is_global in (jnp.array(False), jnp.array(True)):
            for before, after in zip(f(a, is_global), f(b, is_global), strict=True):
                before, after = np.asarray(before), np.asarray(after)
                np.testing.assert_array_equal(np.delete(before, np.s_[5:13], 1), np.delete(after, np.s_[5:13], 1))
                assert np.any(before != after)


def test_exclusive_output_is_orthogonal_to_the_own_value():
    """Fails when the part along the token's own value is not taken out, or another head's value is used."""
    rng = np.random.default_rng(0)
    y, v = rng.normal(size=(2, 5, 6, 8)), rng.normal(size=(2, 5, 3, 8))
    f = jax.jit(lambda y, v: attention.outputs(y, v, None))
    z = np.asarray(f(jnp.asarray(y, jnp.float32), jnp.asarray(v, jnp.float32)), np.float64)
    own = v.repeat(2, 2)  # query heads 2n and 2n + 1 share head n
    np.testing.assert_allclose(np.sum(z * own, -1), 0, atol=5e-6)
    along = np.sum(y * own, -1, keepdims=True) / np.sum(own**2, -1, keepdims=True)
    np.testing.assert_allclose(y - z, along * own, atol=5e-6)


def test_rotation_depends_on_distance_alone_and_leaves_the_second_half(pocket):
    """Fails when pairs are not adjacent, rates are wrong, or more than half of a head turns."""
    theta = attention.angles(50, jnp.array(False), pocket.model)
    np.testing.assert_allclose(theta[7], 7 * 10_000.0 ** (-np.arange(8) / 8), rtol=1e-6)
    assert not np.any(attention.angles(50, jnp.array(True), pocket.model))
    ks = jax.random.split(jax.random.key(0), 2)
    q, k = (jnp.tile(jax.random.normal(key, (1, 1, 1, 32)), (1, 50, 1, 1)) for key in ks)
    rotate = jax.jit(lambda x, theta: attention.turn(x, *attention.turns(theta, 32)))
    a, b = (np.asarray(rotate(x, theta))[0, :, 0] for x in (q, k))
    for distance in (0, 1, 9):
        products = np.einsum("ta,ta->t", a[distance:], b[: 50 - distance])
        np.testing.assert_allclose(products, products[0], atol=2e-5)
    assert not np.allclose(a[9] @ b[0], a[1] @ b[0])
    np.testing.assert_array_equal(a[:, 16:], np.asarray(q)[0, :, 0, 16:])
    np.testing.assert_array_equal(rotate(q, 0 * theta), q)


def test_parts_that_are_chosen_away_have_no_parameters(pocket):
    """Fails when an ablation leaves dead parameters behind."""
    run = spec.override(pocket, ["model.head_gate=none", "model.convolution=none"])
    assert attention.leaves(run).head_gate is None and attention.leaves(run).conv_k is None
    assert set(leaf.flatten(attention.leaves(run))) == {"q", "k", "v", "o"}


def test_hero_has_as_many_attention_parameters_as_published(pocket):
    """Fails when a projection's shape departs from reference_run 1.3: 4,529,848,320 in 48 layers."""
    m = dataclasses.replace(pocket.model, width=6144, heads=48, head_width=128, kv_heads_local=12, kv_heads_global=6)
    hero = attention.leaves(dataclasses.replace(pocket, model=m))
    assert 48 * sum(x.size for x in leaf.flatten(hero).values() if x.part == "attention") == 4_529_848_320
    assert hero.head_gate.size == 6144 * 48 and hero.conv_k.size == 4 * 12 * 128


# ---- the blocked form ---------------------------------------------------------------------------


def operands(b, s, h, n, a, dtype=jnp.float32, seed=0):
    ks = jax.random.split(jax.random.key(seed), 4)
    shapes = (b, s, h, a), (b, s, n, a), (b, s, n, a), (b, s, h, a)
    return tuple(jax.random.normal(key, shape).astype(dtype) for key, shape in zip(ks, shapes, strict=True))


def with_gradients(f, q, k, v, ct):
    def total(q, k, v):
        y = f(q, k, v)
        return jnp.sum(y.astype(jnp.float32) * ct.astype(jnp.float32)), y

    grads, y = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
    return [np.asarray(x, np.float64) for x in (y, *grads)]


def exact(q, k, v, ct, lower):
    """Attention and its three gradients in float64, head by head, by the chain rule."""
    q, k, v, ct = (np.asarray(x, np.float64) for x in (q, k, v, ct))
    y, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    at = np.arange(q.shape[1])
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        n = h // group
        score = q[b, :, h] @ k[b, :, n].T * scale
        score[(at[None] > at[:, None]) | (at[None] < np.asarray(lower)[b][:, None])] = -np.inf
        p = np.exp(score - score.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        y[b, :, h] = p @ v[b, :, n]
        dp = ct[b, :, h] @ v[b, :, n].T
        ds = p * (dp - np.sum(p * dp, -1, keepdims=True)) * scale
        dq[b, :, h] = ds @ k[b, :, n]
        dk[b, :, n] += ds.T @ q[b, :, h]
        dv[b, :, n] += p.T @ ct[b, :, h]
    return y, dq, dk, dv


def bounds(b, s, longest, window):
    at = np.arange(s, dtype=np.int32)
    return jnp.asarray(np.maximum(documents(b, s, longest), at[None] - (window - 1)).astype(np.int32))


SHAPES = {  # B, S, H, N, A, block, longest document, window
    "pocket": (2, 256, 4, 2, 32, 128, 100, 128),
    "odd length": (3, 37, 6, 3, 8, 16, 20, 37),
    "block beyond S": (2, 21, 4, 1, 8, 128, 10, 21),
    "one token": (2, 1, 2, 1, 8, 16, 1, 1),
    "looped": (2, 150, 4, 2, 8, 16, 60, 40),
    "looped odd, one head": (1, 163, 3, 1, 4, 8, 163, 163),
    "one document per token": (2, 150, 4, 4, 8, 16, 1, 150),
}


@pytest.mark.parametrize("name", SHAPES)
def test_blocked_attention_is_exact(name):
    """Fails when the blocked form departs from the float64 one in value or in any gradient."""
    b, s, h, n, a, block, longest, window = SHAPES[name]
    args, lower = operands(b, s, h, n, a), bounds(b, s, longest, window)
    found = with_gradients(lambda q, k, v: attend(q, k, v, lower, block=block), *args)
    for got, want in zip(found, exact(*args, lower), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    if longest == 1:
        np.testing.assert_array_equal(found[0], np.asarray(args[2], np.float64).repeat(h // n, 2))


def test_plain_twin_is_exact():
    """Fails when the twin that others compare with is itself wrong, in value or in gradient."""
    args, lower = operands(3, 37, 6, 3, 8), bounds(3, 37, 20, 25)
    found = with_gradients(lambda q, k, v: attend_plain(q, k, v, lower), *args)
    for got, want in zip(found, exact(*args, lower), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pocket", "looped"])
def test_bf16_follows_float32(name):
    """Fails when sums or the softmax are done in bf16: the error would exceed that of rounding operands."""
    b, s, h, n, a, block, longest, window = SHAPES[name]
    args, lower = operands(b, s, h, n, a, jnp.bfloat16), bounds(b, s, longest, window)
    found = with_gradients(lambda q, k, v: attend(q, k, v, lower, block=block), *args)
    for got, want in zip(found, exact(*args, lower), strict=True):
        assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 2**-7


def test_large_scores_stay_finite():
    """Fails when the largest score is not taken out before the exponential."""
    q, k, v, ct = operands(2, 150, 2, 1, 8)
    lower = bounds(2, 150, 60, 150)
    for block in (16, 128):
        found = with_gradients(lambda q, k, v, block=block: attend(q, k, v, lower, block=block), 300 * q, 300 * k, v, ct)
        assert all(np.all(np.isfinite(x)) for x in found)


def test_key_blocks_outside_the_bounds_are_not_read():
    """Fails when the loops touch a key block below the least bound of a query block: its NaN would spread."""
    q, k, v, ct = operands(2, 160, 2, 1, 8)
    lower = jnp.broadcast_to(jnp.where(jnp.arange(160) < 80, 0, 80), (2, 160)).astype(jnp.int32)
    k, v = k.at[:, :80].set(jnp.nan), v.at[:, :80].set(jnp.nan)
    found = with_gradients(lambda q, k, v: attend(q, k, v, lower, block=16), q, k, v, ct.at[:, :80].set(0))
    for x in found:
        assert np.all(np.isfinite(x[:, 80:]))


def test_memory_is_linear_in_the_length():
    """Fails when a temporary of attention, forward or backward, grows with the square of S."""

    def bytes_at(s):
        shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, s, 4, 16), (1, s, 2, 16), (1, s, 2, 16))]
        lower = jax.ShapeDtypeStruct((1, s), jnp.int32)
        total = jax.grad(lambda q, k, v, lower: jnp.sum(attend(q, k, v, lower, block=128) ** 2), (0, 1, 2))
        return jax.jit(total).lower(*shapes, lower).compile().memory_analysis().temp_size_in_bytes

    temp = {s: bytes_at(s) for s in (1024, 4096, 16_384)}
    assert temp[4096] < 4.5 * temp[1024] and temp[16_384] < 4.5 * temp[4096], temp
    assert temp[16_384] < 4 * 4 * 16_384**2 / 50, temp


def test_blocked_form_runs_under_scan_remat_and_a_mesh(pocket):
    """Fails when the blocked form does not trace inside a scanned, rematerialised body on eight devices."""
    run = spec.override(pocket, SMALL + EIGHT + ["compute.attention_block=2"])
    one = spec.override(run, ["mesh.data=1", "mesh.expert=1"])
    first = documents(B, S, 9)
    stacked = [draw(run, seed) for seed in range(3)]
    results = []
    for r in (run, one):
        with jax.set_mesh(mesh.make(r)):
            layers = leaf.stack(3, attention.leaves(r))
            p = leaf.tree_map(lambda d, *v, r=r: place(r, np.stack(v), d.spec, jnp.float32), layers, *(q for q, _ in stacked))
            x, starts = place(r, stacked[0][1], mesh.B_S_D, jnp.float32), place(r, first, mesh.B_S)

            def total(p, x, starts=starts, r=r):
                def body(x, layer):
                    return x + jax.checkpoint(lambda p, x, g: attention.attention(p, x, starts, g, r))(
                        layer[0], x, layer[1]
                    ), None

                y, _ = jax.lax.scan(body, x, (p, jnp.array([False, False, True])))
                return jnp.sum(jnp.sin(y))

            results.append(jax.device_get(jax.jit(jax.value_and_grad(total, (0, 1)))(p, x)))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
