"""The network as a whole: counts, isolation of documents, named choices, precision, sharding."""

import math
import re
from collections import Counter
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P
from programs import equations

from argosy import leaf, runs, spec
from argosy import mesh as meshes
from argosy.batch import Batch
from argosy.model import exchange as exchange_
from argosy.model import transformer
from argosy.plan import flops, work
from argosy.train import step as steps

SMALL = [
    "model.vocab=64", "model.width=32", "model.head_width=8", "model.window=8", "model.gate_rank=4", "data.seq_len=32",
    "data.batch_seqs=8", "moe.experts=8", "moe.experts_per_token=2", "moe.hidden=16", "moe.latent_width=16",
    "moe.shared_hidden=16", "compute.attention_block=16", "compute.readout_block_tokens=64",
]  # fmt: skip

CHOICES = [
    "moe.latent=none", "moe.shared_experts=0", "model.head_gate=none", "model.convolution=none", "model.attention=plain",
    "model.position=rope_all", "model.position=none", "model.z_loss=none", "routing.balance=aux_loss",
    "routing.balance=sign_bias", "routing.capacity=dropless", "routing.exchange=dense", "compute.remat=block",
]  # fmt: skip


def small(*settings):
    return spec.override(runs.find("pocket"), [*SMALL, *settings])


def documents(run, seed=0, lengths=(11, 13, 8)):
    """A batch of packed random documents."""
    rng = np.random.default_rng(seed)
    b, s = run.data.batch_seqs, run.data.seq_len
    text = rng.integers(1, run.model.vocab, (b, s + 1)).astype(np.int32)
    starts = np.zeros((b, s), np.int32)
    for at in np.cumsum(lengths)[:-1]:
        starts[:, at:] = at
        text[:, at] = 0
    return Batch(text[:, :-1], text[:, 1:], starts, np.ones((b, s), bool))


def on(mesh, batch):
    return jax.tree.map(lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, meshes.B_S)), batch)


@lru_cache
def compiled(function, run):
    return programs.jit(partial(function, run=run))


def evaluate(run, function, batch, seed=0):
    mesh = meshes.make(run)
    with jax.set_mesh(mesh):
        params = leaf.init(transformer.leaves(run), mesh, seed)
        bias = jnp.zeros((run.model.layers, run.moe.experts))
        return compiled(function, run)(params, bias, on(mesh, batch))


def mean_loss(params, bias, batch, run):
    out = transformer.loss(params, bias, batch, run)
    return out.sums.total / out.sums.tokens.astype(jnp.float32) + out.aux


gradients = jax.value_and_grad(mean_loss)


@pytest.mark.parametrize(
    "name", ["pocket", "marin-535b", "marin-535b/d768", "marin-535b/d1024", "marin-535b/d1536", "marin-535b/d2048"]
)
def test_counted_leaves_equal_the_closed_form(name):
    run = runs.find(name)
    by_part: dict[str, int] = {}
    for one in leaf.flatten(transformer.leaves(run)).values():
        by_part[one.part] = by_part.get(one.part, 0) + one.size
    expected = flops.params(run)
    del expected["router_bias"]  # state, not a leaf
    assert by_part == {part: n for part, n in expected.items() if n}


@pytest.mark.parametrize("choice", [c for c in CHOICES if c.startswith(("moe", "model"))])
def test_counts_follow_every_named_choice(choice):
    run = small(choice)
    counted = sum(one.size for one in leaf.flatten(transformer.leaves(run)).values())
    expected = flops.params(run)
    assert counted == sum(expected.values()) - expected["router_bias"]


def test_changing_one_document_leaves_the_others_bit_identical():
    run = small("routing.exchange=dense", "model.layers=2")  # a local one and a global one
    batch = documents(run)
    other = batch.tokens.copy()
    other[:, 14:20] = (other[:, 14:20] + 7) % run.model.vocab
    before, after = (np.asarray(evaluate(run, transformer.nll, b)) for b in (batch, batch._replace(tokens=other)))
    kept = np.r_[0:11, 24:32]
    np.testing.assert_array_equal(before[:, kept], after[:, kept])
    assert (before[:, 14:24] != after[:, 14:24]).any()  # the test can see a change


@pytest.mark.slow
def test_every_position_sees_only_its_past():
    run = small("routing.exchange=dense")
    batch = documents(run, lengths=(32,))
    other = batch.tokens.copy()
    other[:, 20:] = (other[:, 20:] + 5) % run.model.vocab
    before, after = (np.asarray(evaluate(run, transformer.nll, b)) for b in (batch, batch._replace(tokens=other)))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["routing.balance=quantile", *CHOICES])
def test_every_named_choice_has_a_finite_loss_and_gradient(choice):
    run = small(choice)
    value, grads = evaluate(run, gradients, documents(run))
    assert abs(float(value) - np.log(run.model.vocab)) < 0.5  # a fresh network knows nothing
    for name, g in zip(leaf.flatten(transformer.leaves(run)), jax.tree.leaves(grads), strict=True):
        assert np.isfinite(g).all(), name
        assert np.abs(g).max() > 0, name


@pytest.mark.slow
def test_padding_changes_nothing():
    run = small("routing.capacity=dropless")
    batch = documents(run)
    short = batch._replace(valid=np.arange(32)[None] < np.full((8, 1), 24))
    noise = np.where(short.valid, batch.tokens, 5).astype(np.int32)
    values = [evaluate(run, gradients, b) for b in (short, short._replace(tokens=noise))]
    for a, b in zip(jax.tree.leaves(values[0]), jax.tree.leaves(values[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)


def learned(precision, updates=40):
    """Cross-entropy of each update on one fixed text, 192 random tokens over and over, at the run's own learning rate."""
    run = small(f"optim.horizon_tokens={updates * 256}", f"compute.precision={precision}")
    word = np.random.default_rng(0).integers(1, run.model.vocab, 192).astype(np.int32)
    shape = (run.data.batch_seqs, run.data.seq_len)
    text = np.resize(word, shape[0] * shape[1] + 1)
    batch = Batch(text[:-1].reshape(shape), text[1:].reshape(shape), np.zeros(shape, np.int32), np.ones(shape, bool))
    mesh = meshes.make(run)
    with jax.set_mesh(mesh):
        state, update, batch, curve = steps.init(run, mesh), steps.compiled(run), on(mesh, batch), []
        for _ in range(updates):
            state, stats = update(state, batch)
            curve.append(float(stats.cross_entropy))
    return np.array(curve)


@pytest.mark.slow
def test_bf16_learns_as_fp32_does():
    """Fails when a sum, a norm or a state that must be float32 is not: the curves part. They part by 0.12% here."""
    full, half = (learned(precision) for precision in ("fp32", "bf16"))
    assert full[0] == pytest.approx(np.log(64), abs=0.2)
    assert full[-1] < 0.8 * full[0]
    smooth = [np.convolve(curve, np.full(10, 0.1), "valid") for curve in (full, half)]
    np.testing.assert_allclose(smooth[1], smooth[0], rtol=0.005)
    assert (full != half).any()  # they are two precisions


@pytest.mark.slow
def test_remat_changes_no_number():
    batch = documents(small())
    plain, again = (evaluate(small(f"compute.remat={r}"), gradients, batch) for r in ("none", "block"))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


ROOM = ["routing.receiver_capacity=8", "routing.sender_capacity=8", "routing.waves=2", "model.layers=1"]
BARE = ["model.convolution=none", "model.head_gate=none", "model.attention=plain", "moe.shared_experts=0"]
RANKS = ["mesh.data=2", "mesh.expert=4", "routing.exchange=pooled_wave"]


def test_one_device_equals_eight_where_nothing_drops():
    """Loss, gradients, statistics and next bias over every axis; with sequences of padding added, and with remat."""
    batch = documents(small())
    one = evaluate(small(*ROOM), jax.value_and_grad(reported, has_aux=True), batch)
    padded = Batch(*(np.insert(x, np.arange(8), x[::-1], axis=0) for x in batch[:3]), np.tile([[False], [True]], (8, 32)))
    mesh = ["mesh.replica=2", "mesh.data=2", "mesh.expert=2", "routing.exchange=pooled_wave"]
    run = small(*ROOM, *mesh, "data.batch_seqs=16", "compute.remat=block_keep_dispatch")
    ((loss, report), grads), ((loss_one, report_one), grads_one) = (
        jax.device_get(x) for x in (evaluate(run, jax.value_and_grad(reported, has_aux=True), padded), one)
    )
    assert float(loss) == pytest.approx(float(loss_one), rel=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_one), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-12
    for name in ("load", "entropy", "max_load", "load_balancing_loss", "z", "margin_min", "margin_max"):
        np.testing.assert_allclose(getattr(report.routing, name), getattr(report_one.routing, name), rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(report.next_bias, report_one.next_bias, rtol=1e-5, atol=1e-6)
    counted = {name: n.item() for name, n in {**report.ledger._asdict(), **report.fairness._asdict()}.items()}
    assert counted == {
        "assignments": 1024, "valid": 512, "accepted": 512, "sender_dropped": 0, "receiver_dropped": 0, "padding": 512,
        "accepted_lowest": 1.0, "accepted_highest": 1.0,
    }  # fmt: skip


def reported(params, bias, batch, run):
    out = transformer.loss(params, bias, batch, run)
    return out.sums.total / out.sums.tokens.astype(jnp.float32), out.layers


@pytest.mark.parametrize("exchange", ["pooled_wave", "ragged"])
def test_what_remat_keeps_is_not_sent_again(exchange):
    """Rows go out and come back, and their gradients likewise: four ways. `block` sends both once more, `block_keep_dispatch`
    only the way back; every name that its policy keeps is in the program."""
    ways = {}
    for remat in ("none", "block", "block_keep_dispatch"):
        run = small(*ROOM, *RANKS, *BARE, f"routing.exchange={exchange}", f"compute.remat={remat}")
        mesh = meshes.abstract(run)
        with jax.sharding.use_abstract_mesh(mesh):
            batch = jax.tree.map(lambda x: shaped(mesh, x.shape, x.dtype, meshes.B_S), documents(run))  # noqa: B023
            args = leaf.shapes(transformer.leaves(run), mesh), shaped(mesh, (1, 8), jnp.float32, P(None, None)), batch
            found = list(equations(jax.make_jaxpr(jax.grad(partial(mean_loss, run=run)))(*args).jaxpr))
        names = {one.params["name"] for one in found if one.primitive.name == "name"}
        assert set(exchange_.KEPT) <= names
        ways[remat] = sum(travels(one) for one in found) / run.routing.waves
        if exchange == "pooled_wave":  # three products in each pass that the plan counts
            assert sum(multiplies(one) for one in found) == 3 * work.passes(run) * run.routing.waves
    assert ways == {"none": 4, "block": 6, "block_keep_dispatch": 5}


def travels(one):
    """Whether an equation moves rows over the axis `expert`: on a CPU `ragged` gathers them, its counts are whole numbers."""
    gathers = one.primitive.name == "all_gather" and one.params["axis_name"] in ("expert", ("expert",))
    return one.primitive.name == "all_to_all" or (gathers and one.outvars[0].aval.dtype == jnp.float32)


def multiplies(one):
    """Whether an equation is a product of rows with the weights of one expert each, or of their gradients."""
    return (
        one.primitive.name == "dot_general"
        and one.params["dimension_numbers"][1] == ((0,), (0,))
        and ({v.aval.shape[0] for v in one.invars} == {2})
    )


def shaped(mesh, shape, dtype, spec_):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec_))


COLLECTIVE = re.compile(r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(")


def test_collectives_of_the_compiled_forward_pass():
    """Two all-to-alls per wave, none for expert numbers; the embedding look-up has no collective at all."""
    run = small(*ROOM, *RANKS, *BARE)
    mesh = meshes.make(run)
    with jax.set_mesh(mesh):
        params, bias = leaf.shapes(transformer.leaves(run), mesh), jnp.zeros((1, 8))
        batch = on(mesh, documents(run))
        text = jax.jit(partial(transformer.loss, run=run)).lower(params, bias, batch).compile().as_text()
        look_up = jax.jit(partial(transformer.embed, dtype=jnp.bfloat16)).lower(params.embed, batch.tokens).compile().as_text()
    found = Counter(COLLECTIVE.findall(text))
    assert found["all-to-all"] == 2 * run.routing.waves * run.model.layers == 4
    assert found["all-gather"] > 0  # of weights: the pattern reads this text
    assert not COLLECTIVE.search(look_up)


@pytest.mark.parametrize("name", ["pocket", "marin-535b", "marin-535b/d768"])
def test_every_leaf_is_divided_but_those_that_may_be_whole(name):
    run = spec.override(runs.find(name), ["mesh.data=2", "mesh.expert=4", "routing.waves=1", "routing.exchange=pooled_wave"])
    sizes = dict(zip(spec.AXES, meshes.sizes(run), strict=True))
    whole = set()
    for path, one in leaf.flatten(transformer.leaves(run)).items():
        over = 1
        for size, part in zip(one.shape, one.spec, strict=True):
            here = math.prod(sizes[axis] for axis in ((part,) if isinstance(part, str) else part or ()))
            assert size % here == 0, path
            over *= here
        assert over == (4 if one.part == "routed" else 8) or (over == 1 and one.part in meshes.MAY_REPLICATE), path
        whole |= {one.part} if over == 1 else set()
    assert whole == set(meshes.MAY_REPLICATE)


def test_the_reference_shape_traces_on_its_704_devices():
    """Fails when a shape or a sharding of the whole loss and gradient is wrong at full scale; nothing is allocated."""
    run = runs.find("marin-535b")
    mesh = meshes.abstract(run)
    leaves = transformer.leaves(run)
    with jax.sharding.use_abstract_mesh(mesh):
        shape = (run.data.batch_seqs, run.data.seq_len)

        def array(shape, dtype, spec_):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec_))

        batch = Batch(*(array(shape, t, meshes.B_S) for t in (jnp.int32, jnp.int32, jnp.int32, jnp.bool_)))
        bias = array((48, 384), jnp.float32, jax.sharding.PartitionSpec(None, None))
        grads = jax.eval_shape(jax.grad(partial(mean_loss, run=run)), leaf.shapes(leaves, mesh), bias, batch)
    for (name, one), g in zip(leaf.flatten(leaves).items(), jax.tree.leaves(grads), strict=True):
        assert g.shape == one.shape, name
        assert g.sharding.spec == one.spec, name
