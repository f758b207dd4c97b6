"""The ragged transport against the dense oracle, its table against numpy that takes turns, its program for accelerators."""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractDevice, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import equations

from argosy import leaf, mesh, spec
from argosy.model import exchange
from argosy.model.exchange import dense, ragged
from argosy.model.experts import Routed
from argosy.runs import pocket

E, Z, F, T, K = 16, 8, 6, 96, 3
CPU = ragged.How("gather", "padded")
ACCELERATOR = ragged.How("ragged_all_to_all", "ragged_dot")
SHARDED, ROWS = P(mesh.BATCH), P(mesh.BATCH, None)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


WEIGHTS = Routed(0.5 * normal(0, E, Z, F), 0.5 * normal(1, E, Z, F), 0.5 * normal(2, E, F, Z))
X, COMBINE, OUT = normal(3, T, Z), np.abs(normal(4, T, K)), normal(5, T, Z)


def choose(odds):
    rng = np.random.default_rng(0)
    return np.array([rng.choice(E, K, replace=False, p=odds / odds.sum()) for _ in range(T)])


def cases():
    skewed, some = choose(1.5 ** -np.arange(E)), np.random.default_rng(1).random(T) < 0.7
    all_valid = np.ones(T, bool)
    return {
        "even": ((np.arange(T)[:, None] * K + np.arange(K)[None, :]) % E, all_valid),
        "skewed": (skewed, all_valid),
        "all to one expert": (np.full((T, K), 11), all_valid),
        "an empty expert": (choose(np.where(np.arange(E) == 2, 0.0, 1.0)), all_valid),
        "padding among tokens": (skewed, some),
        "a rank without a valid token": (skewed, np.arange(T) >= T // 8),
        "nothing valid": (skewed, ~all_valid),
    }


CASES = cases()


def relative(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)


def assert_near(got, expected, bound=1e-5):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(np.asarray(a)).all(), path
        assert relative(a, b) < bound, (path, relative(a, b))


# ---- the table ------------------------------------------------------------------------------------


def turns(demand, room):
    """The senders' rows of one expert, taken one by one in turn until `room` is full."""
    got = np.zeros_like(demand)
    while room and (got < demand).any():
        for s in np.flatnonzero(got < demand):
            if room:
                got[s], room = got[s] + 1, room - 1
    return got


def test_equal_senders_differ_by_one():
    """Four senders with three rows each meet room for six: 2, 2, 1, 1."""
    np.testing.assert_array_equal(ragged.split(jnp.full((4, 1), 3), jnp.array([6]))[:, 0], [2, 2, 1, 1])


split = jax.jit(ragged.split)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), most=st.integers(1, 9))
def test_split_takes_turns(seed, most):
    rng = np.random.default_rng(seed)
    demand = rng.integers(0, most, (5, 7))
    taken = np.minimum(demand.sum(0), rng.integers(0, 5 * most, 7))
    got = split(jnp.asarray(demand, jnp.int32), jnp.asarray(taken, jnp.int32))
    np.testing.assert_array_equal(got, np.stack([turns(d, t) for d, t in zip(demand.T, taken, strict=True)], 1))


def test_experts_of_a_chunk_share_its_room():
    """The first experts take what they ask for; what is left limits the next, and the last may get nothing."""
    got = ragged.accept(jnp.array([[3, 5, 4], [9, 0, 2], [1, 2, 3]]), jnp.int32(7))
    np.testing.assert_array_equal(got, [[3, 4, 0], [7, 0, 0], [1, 2, 3]])


def test_buffer_at_the_reference_shape(pocket):
    """Half of 1.15 x 524,288 assignments in two chunks (expert_parallel A2); never more than all could send."""
    two = spec.override(pocket, ["routing.waves=2", "routing.receiver_capacity=1.15"]).routing
    assert ragged.chunk_rows(524_288, 64, two) == 301_466
    assert ragged.chunk_rows(8, 1, spec.override(pocket, ["routing.receiver_capacity=100"]).routing) == 8


def expected_keep(chosen, valid, replicas, ranks, waves, factor):
    """Which assignments are carried, found by filling buffers one row at a time."""
    keep = np.zeros(chosen.shape, bool)
    here, shard = E // ranks, T // (replicas * ranks)
    for replica in range(replicas):
        senders = [range((replica * ranks + s) * shard, (replica * ranks + s + 1) * shard) for s in range(ranks)]
        total = sum(valid[list(s)].sum() for s in senders) * K
        most = min(shard * K * ranks, math.ceil(factor * shard * K / waves))
        room_each = min(max(1, math.ceil(np.float32(total) * np.float32(factor / (ranks * waves)))), most)
        for first in range(0, E, here // waves):
            room = room_each
            for e in range(first, first + here // waves):
                queues = [[(t, k) for t in s for k in range(K) if valid[t] and chosen[t, k] == e] for s in senders]
                got = turns(np.array([len(q) for q in queues]), room)
                room -= got.sum()
                for queue, n in zip(queues, got, strict=True):
                    for at in queue[:n]:
                        keep[at] = True
    return keep


# ---- against the oracle ---------------------------------------------------------------------------


@lru_cache
def oracle():
    def loss(p, x, weights, chosen, valid):
        y, _ = dense.dense(p, x, chosen, weights, valid, pocket.run().routing, "bounded")
        return jnp.sum(y * OUT), y

    return programs.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def expected(case, keep):
    """y and gradients of the oracle without the assignments that are not kept."""
    chosen, valid = CASES[case]
    (_, y), (dp, dx, dw) = oracle()(WEIGHTS, X, COMBINE * keep, jnp.asarray(chosen, jnp.int32), valid)
    return jax.device_get((y, dp, dx, np.where(keep, dw, 0)))


def run_of(replicas, ranks, waves, factor, *more):
    sizes = [f"mesh.replica={replicas}", f"mesh.expert={ranks}", f"routing.waves={waves}", "routing.exchange=ragged"]
    return spec.override(pocket.run(), [*sizes, f"routing.receiver_capacity={factor}", f"moe.experts={E}", *more])


def carried(run, by, capacity="bounded", dtype=jnp.float32):
    """y, gradients to experts, tokens and weights, and every shard's ledger, as a function of the routing."""

    def shard(p, x, weights, chosen, valid):
        p = jax.tree.map(lambda w: lax.pcast(w, ("replica", "data"), to="varying"), p)
        p, x, chosen, weights, valid = lax.pcast((p, x, chosen, weights, valid), ("context",), to="varying")
        y, book = ragged.ragged(p, x, chosen, weights, valid, run.routing, capacity, by=by)
        return lax.psum(y, "context"), jax.tree.map(lambda n: lax.psum(n, "context")[None], book)

    over = jax.tree.map(lambda _: P("expert", None, None), WEIGHTS)
    carry = jax.shard_map(shard, in_specs=(over, ROWS, ROWS, ROWS, SHARDED), out_specs=(ROWS, SHARDED))

    def loss(p, x, weights, chosen, valid):
        y, book = carry(jax.tree.map(lambda w: w.astype(dtype), p), x.astype(dtype), weights, chosen, valid)
        return jnp.sum(y.astype(jnp.float32) * jax.sharding.reshard(OUT, ROWS)), (y, book)

    return programs.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True)), (over, ROWS, ROWS, ROWS, SHARDED)


def observed(run, program, places, chosen, valid, spoil=False):
    """What the transport makes of a routing; `spoil` puts NaN into all that belongs to padding."""
    m = mesh.make(run)
    bad = np.where(valid, 0, np.nan)[:, None] if spoil else np.zeros((T, 1))
    values = (WEIGHTS, X + bad, COMBINE + bad, chosen, valid)
    kinds = (np.float32, np.float32, np.float32, np.int32, bool)
    with jax.set_mesh(m):
        put = lambda x, kind, where: jax.device_put(np.asarray(x, kind), NamedSharding(m, where))  # noqa: E731
        args = [
            jax.tree.map(lambda x, w, kind=kind: put(x, kind, w), v, place)
            for v, kind, place in zip(values, kinds, places, strict=True)
        ]
        (_, (y, book)), (dp, dx, dw) = program(*args)
    return jax.device_get((y, dp, dx, dw)), np.stack(jax.device_get(book), 1)


def assert_ledger(book, valid, keep):
    """Each shard's ledger is that of its own assignments; refusals are the receivers' alone."""
    shards = len(book)
    good, kept = valid.reshape(shards, -1).sum(1) * K, keep.reshape(shards, -1).sum(1)
    each = np.full(shards, T * K // shards)
    np.testing.assert_array_equal(book, np.stack([each, good, kept, 0 * each, good - kept, each - good], 1))
    np.testing.assert_array_equal(book[:, 2:].sum(1), book[:, 0])


@pytest.mark.parametrize(
    ("replicas", "ranks", "waves", "factor", "drops"),
    [(1, 1, 2, 2, 0), (2, 4, 2, 8, 0), (1, 8, 2, 0.9, 1)]
    + [pytest.param(*c, marks=pytest.mark.slow) for c in [(1, 2, 1, 2, 0), (1, 8, 1, 8, 0), (2, 2, 2, 0.8, 1)]],
)
def test_equals_dense_without_the_dropped_assignments(replicas, ranks, waves, factor, drops):
    """Output, every gradient and every shard's ledger; with capacity for all of it nothing is dropped."""
    run = run_of(replicas, ranks, waves, factor)
    program = carried(run, CPU)
    for case, (chosen, valid) in CASES.items():
        keep = expected_keep(chosen, valid, replicas, ranks, waves, factor)
        assert ((valid[:, None] & ~keep).sum() > 0) == (drops and case != "nothing valid"), case
        got, book = observed(run, *program, chosen, valid, spoil=True)
        assert_near(got, expected(case, keep))
        assert_ledger(book, valid, keep)


def test_dropless_is_exact(pocket):
    run = run_of(1, 2, 1, 0.5)
    program = carried(run, CPU, "dropless")
    for case in ("skewed", "padding among tokens"):
        chosen, valid = CASES[case]
        got, book = observed(run, *program, chosen, valid)
        keep = np.broadcast_to(valid[:, None], chosen.shape)
        assert_near(got, expected(case, keep))
        assert_ledger(book, valid, keep)


def test_bf16_follows_fp32():
    run = run_of(1, 4, 2, 4)
    got, _ = observed(run, *carried(run, CPU, dtype=jnp.bfloat16), *CASES["skewed"])
    assert got[0].dtype == jnp.bfloat16
    assert_near(jax.tree.map(np.float32, got), expected("skewed", np.ones((T, K), bool)), 0.02)


@pytest.mark.slow
def test_the_whole_block_equals_dense():
    """Gradients of router, experts, latent and shared experts, and of what comes before; statistics and next bias."""
    small = ["model.width=16", "moe.experts_per_token=3", "moe.hidden=8", "moe.latent_width=8", "moe.shared_hidden=8",
             "data.seq_len=8", "data.batch_seqs=8", "routing.histogram_bins=64"]  # fmt: skip
    found = {}
    for name in ("ragged", "dense"):
        run = run_of(2, 4, 2, 8, *small, f"routing.exchange={name}")
        m = mesh.make(run)
        with jax.set_mesh(m):
            p, x = leaf.init(exchange.leaves(run), m, 0), jax.device_put(normal(0, 8, 8, 16), NamedSharding(m, mesh.B_S_D))
            valid = jax.device_put(normal(1, 8, 8) < 1, NamedSharding(m, mesh.B_S))

            def loss(p, x, valid, run=run):
                y, stats = exchange.moe(p, x, jnp.zeros(E), valid, run)
                return jnp.sum(y * jax.sharding.reshard(normal(2, 8, 8, 16), mesh.B_S_D)), (y, stats)

            (_, (y, stats)), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(p, x, valid)
            found[name] = jax.device_get((y, grads, stats.next_bias, tuple(stats.ledger)))
    assert_near(found["ragged"][:3], found["dense"][:3])
    assert found["ragged"][3] == found["dense"][3]


# ---- the experts ----------------------------------------------------------------------------------


def product_program(form, load):
    def loss(p, rows):
        y = ragged.products(p, rows, jnp.asarray(load, jnp.int32), form)
        return jnp.sum(y * OUT), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("load", [[3, 0, 40, 8, 2], [0, 0, 0, 0, 96], [0, 0, 0, 0, 0]])
def test_both_forms_of_the_products(load):
    """Each row by its own expert as numpy does it; the rows behind are NaN and reach nothing."""
    p, end = jax.tree.map(lambda w: w[:5], WEIGHTS), sum(load)
    rows = np.where(np.arange(T)[:, None] < end, X, np.nan)
    of, wide = np.repeat(np.arange(5), load), jax.tree.map(lambda w: w.astype(np.float64), p)
    y = np.zeros((T, Z))
    for r, e in enumerate(of):
        gate, up = rows[r] @ wide.gate[e], rows[r] @ wide.up[e]
        y[r] = (gate / (1 + np.exp(-gate)) * up) @ wide.down[e]
    found = {}
    for form in ("ragged_dot", "padded"):
        (_, got), (dp, drows) = product_program(form, load)(p, rows)
        assert_near(got, y)
        found[form] = jax.device_get((dp, drows[:end]))
    assert_near(found["ragged_dot"], found["padded"])


def test_what_a_product_leaves_in_rows_of_no_group_ends_there(monkeypatch):
    """An implementation may leave anything there, in a result and in a gradient: here NaN."""
    plain = lax.ragged_dot

    @jax.custom_vjp
    def careless(rows, w, load):
        return spoiled(plain(rows, w, load), load)

    def spoiled(rows, load):
        return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(load))[:, None], rows, jnp.nan)

    def backward(saved, g):
        rows, w, load = saved
        drows, dw = jax.vjp(lambda rows, w: plain(rows, w, load), rows, w)[1](g)
        return spoiled(drows, load), dw, None

    careless.defvjp(lambda *saved: (careless(*saved), saved), backward)
    p, load = jax.tree.map(lambda w: w[:3], WEIGHTS), [5, 0, 20]
    (_, y), grads = product_program("ragged_dot", load)(p, X)
    monkeypatch.setattr(lax, "ragged_dot", careless)
    (_, y_spoiled), grads_spoiled = product_program("ragged_dot", load)(p, X)
    kept = lambda y, grads: (y, grads[0], grads[1][:25])  # noqa: E731  what lies behind is not sent back
    for a, b in zip(jax.tree.leaves(kept(y_spoiled, grads_spoiled)), jax.tree.leaves(kept(y, grads)), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- the program for accelerators -------------------------------------------------------------------


def by_the_senders(operand, output, start, sent, land, got, *, axis_name):
    """`lax.ragged_all_to_all` after its documentation, from what the senders say; NaN where `got` contradicts them."""
    ranks, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    every = lax.all_gather(operand, axis_name)
    start, sent, land = (lax.all_gather(v, axis_name).reshape(ranks, ranks, -1)[:, me] for v in (start, sent, land))
    result = output
    for s in range(ranks):
        for j in range(sent.shape[1]):
            offset = jnp.arange(output.shape[0]) - land[s, j]
            rows = every[s].at[jnp.clip(start[s, j] + offset, 0, operand.shape[0] - 1)].get()
            result = jnp.where(((offset >= 0) & (offset < sent[s, j]))[:, None], rows, result)
    return jnp.where(jnp.all(got == sent.reshape(-1)), result, jnp.nan)


def test_offsets_mean_what_the_primitive_says(monkeypatch):
    """The accelerators' program with the primitive written out: equal to dense, gradients too, with and without drops."""
    monkeypatch.setattr(lax, "ragged_all_to_all", by_the_senders)
    run = run_of(1, 2, 2, 1.1)
    program = carried(run, ACCELERATOR)
    for case in ("even", "skewed", "padding among tokens"):
        chosen, valid = CASES[case]
        keep = expected_keep(chosen, valid, 1, 2, 2, 1.1)
        assert (keep == valid[:, None]).all() == (case == "even")
        got, book = observed(run, *program, chosen, valid)
        assert_near(got, expected(case, keep))
        assert_ledger(book, valid, keep)


def traced(run, platform):
    """The traced step of one block for devices that are not there, and all of its equations."""
    device = AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    m = mesh.abstract(run).update(abstract_device=device)
    b, s = run.data.batch_seqs, run.data.seq_len
    x = jax.ShapeDtypeStruct((b, s, run.model.width), jnp.bfloat16, sharding=NamedSharding(m, mesh.B_S_D))
    valid = jax.ShapeDtypeStruct((b, s), jnp.bool_, sharding=NamedSharding(m, mesh.B_S))
    bias = jax.ShapeDtypeStruct((run.moe.experts,), jnp.float32)

    def loss(p, x, b, v):
        return jnp.sum(exchange.moe(p, x, b, v, run)[0].astype(jnp.float32))

    with jax.sharding.use_abstract_mesh(m):
        found = jax.jit(jax.grad(loss, (0, 1))).trace(leaf.shapes(exchange.leaves(run), m), x, bias, valid)
    return found, list(equations(found.jaxpr.jaxpr))


def test_operations_follow_the_devices(monkeypatch):
    """The devices that are here, or those that a mesh without devices stands for; one rank needs no collective."""

    def chosen(platform, ranks=4):
        m = mesh.abstract(run_of(2, 4, 2, 1.1)).update(abstract_device=AbstractDevice("any", None, platform))
        with jax.sharding.use_abstract_mesh(m):
            return ragged.how(ranks)

    monkeypatch.setenv("XLA_FLAGS", "")
    assert ragged.how(4) == (CPU if jax.default_backend() == "cpu" else ragged.How("ragged_all_to_all", "padded"))
    assert chosen("cpu") == CPU and chosen("tpu") == ACCELERATOR
    assert chosen("gpu") == ragged.How("ragged_all_to_all", "padded") and chosen("gpu", 1) == CPU
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_experimental_use_ragged_dot_fusion=true")
    assert chosen("gpu") == ACCELERATOR


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_what_the_program_is_made_of(platform):
    """On an accelerator two ragged all-to-alls per chunk, forward and backward, and one gather of counts; no activation
    is scattered anywhere. The program for the GPU lowers, though none is here."""
    run = run_of(2, 4, 2, 1.1)
    found, all_of_them = traced(run, platform)
    moved = [one for one in all_of_them if one.primitive.name == "ragged_all_to_all"]
    over_experts = [one for one in all_of_them if one.primitive.name == "all_gather" and one.params["axis_name"] == ("expert",)]
    gathered = [one.invars[0].aval for one in over_experts]
    assert len(moved) == (8 if platform == "gpu" else 0)
    assert [a.shape for a in gathered if a.dtype == jnp.int32] == [(E,)]
    divided = [
        w for w in leaf.flatten(exchange.leaves(run)).values() if mesh.FSDP in w.spec
    ]  # latent and shared: gathered once
    assert sum(a.dtype == jnp.bfloat16 for a in gathered) == len(divided) + (0 if platform == "gpu" else 8)
    for one in all_of_them:
        if one.primitive.name.startswith("scatter"):
            assert one.outvars[0].aval.dtype == jnp.int32, one
    if platform == "gpu":
        assert found.lower(lowering_platforms=("cuda",)).as_text().count("@ragged_all_to_all") == 8


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="XLA:CPU has no ragged all-to-all")
def test_the_primitive_itself_equals_dense():
    """On all GPUs that are here, one too: outputs, gradients and ledger, with and without drops."""
    ranks = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())
    for factor in (2 * ranks, 0.9):
        run = run_of(1, ranks, 2, factor)
        with jax.default_matmul_precision("highest"):
            program = carried(run, ACCELERATOR)
            for case, (chosen, valid) in CASES.items():
                keep = expected_keep(chosen, valid, 1, ranks, 2, factor)
                got, book = observed(run, *program, chosen, valid, spoil=True)
                assert_near(got, expected(case, keep))
                assert_ledger(book, valid, keep)
