"""The whole network beside one written again, in numpy and float64, from reference_run sections 1.2 and 2.

Fails when any formula of the forward pass, or the order in which they meet, is another than the reference's.
"""

from functools import partial

import jax
import numpy as np
import pytest

from argosy import leaf, runs, spec
from argosy import mesh as meshes
from argosy.batch import Batch
from argosy.model import transformer

# Two of four layers are global, one by the count and one by being last; each kind has groups of query heads.
TINY = [
    "model.vocab=48", "model.width=24", "model.layers=4", "model.global_every=3", "model.heads=8", "model.head_width=8",
    "model.kv_heads_local=4", "model.kv_heads_global=2", "model.window=6", "model.gate_rank=4", "data.seq_len=32",
    "data.batch_seqs=4", "moe.experts=8", "moe.experts_per_token=3", "moe.hidden=12", "moe.latent_width=20",
    "moe.shared_hidden=16", "compute.attention_block=8", "compute.readout_block_tokens=40", "routing.capacity=dropless",
]  # fmt: skip


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, gain, eps):
    return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def gated_norm(p, x):
    y = rms(x, p.gain, 1e-5)
    return y * sigmoid(silu(y @ p.down) @ p.up)


def sconv(x, taps, start):
    return np.stack([sum(taps[j] * x[t - j] for j in range(4) if j == 0 or t - j >= start[t]) for t in range(len(x))])


def rotated(x):
    """Pairs (2i, 2i+1) of the first half of the dims, as complex numbers turned by t 10000^(-i / pairs)."""
    length, width = x.shape
    pairs = width // 4
    first = x[:, : 2 * pairs : 2] + 1j * x[:, 1 : 2 * pairs : 2]
    first = first * np.exp(1j * np.arange(length)[:, None] * 10_000.0 ** (-np.arange(pairs) / pairs))
    out = x.copy()
    out[:, : 2 * pairs : 2], out[:, 1 : 2 * pairs : 2] = first.real, first.imag
    return out


def attention(p, a, start, is_global, m):
    q, k, v = a @ p.q, sconv(a @ p.k, p.conv_k, start), a @ p.v
    size, width = len(a), m.head_width
    gate, outputs = 2 * sigmoid(a @ p.head_gate), []
    at = np.arange(size)
    seen = (at[None] <= at[:, None]) & (at[None] >= start[:, None])
    if not is_global:
        seen &= at[:, None] - at[None] < m.window
    for h in range(m.heads):
        n = h // (m.heads // (m.kv_heads_global if is_global else m.kv_heads_local))
        one = slice(h * width, h * width + width), slice(n * width, n * width + width)
        qh, kh, vh = rms(q[:, one[0]], 1, 1e-6), rms(k[:, one[1]], 1, 1e-6), v[:, one[1]]
        if not is_global:
            qh, kh = rotated(qh), rotated(kh)
        scores = np.where(seen, 1.3 * qh @ kh.T / np.sqrt(width), -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        y = weights / weights.sum(1, keepdims=True) @ vh
        y = y - (y * vh).sum(1, keepdims=True) / ((vh**2).sum(1, keepdims=True) + 1e-6) * vh
        outputs.append(gate[:, h : h + 1] * y)
    return np.concatenate(outputs, 1) @ p.o


def moe(p, m, bias, k):
    """Routed and shared experts of one sequence; also how far the nearest choice between two experts was."""
    s, e = m @ p.router, p.experts
    u = rms(m @ e.latent.down, e.latent.gain, 1e-5)
    routed, close = np.zeros_like(u), np.inf
    for t, order in enumerate(np.argsort(-(s + bias), axis=1)):
        chosen, ranked = order[:k], (s[t] + bias)[order]
        close = min(close, ranked[k - 1] - ranked[k])
        for x in chosen:
            c = 2.5 * sigmoid(s[t, x]) / (sigmoid(s[t, chosen]).sum() + 1e-9)
            routed[t] += c * ((silu(u[t] @ e.routed.gate[x]) * (u[t] @ e.routed.up[x])) @ e.routed.down[x])
    shared = sum((silu(m @ g) * (m @ up)) @ down for g, up, down in zip(*e.shared, strict=True))
    return routed @ e.latent.up + shared, close


def reference(p, bias, tokens, labels, start, run):
    """Each label's cross-entropy and each position's squared logsumexp in one sequence, and the nearest choice."""
    x, close = gated_norm(p.norm_embed, p.embed[tokens]), np.inf
    for i in range(run.model.layers):
        b = jax.tree.map(lambda w, i=i: w[i], p.blocks)
        is_global = (i + 1) % run.model.global_every == 0 or i == run.model.layers - 1
        y = attention(b.attention, gated_norm(b.norm_attention, x), start, is_global, run.model)
        x = x + sconv(y, b.conv_attention, start)
        y, near = moe(b.moe, gated_norm(b.norm_moe, x), bias[i], run.moe.experts_per_token)
        x, close = x + sconv(y, b.conv_moe, start), min(close, near)
    logits = gated_norm(p.norm_final, x) @ p.readout
    top = logits.max(1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(1))
    return lse - logits[np.arange(len(labels)), labels], lse**2, close


# So small that the epsilons of the norms and of the exclusive output are seen; what follows them makes up for it.
SCALES = {"embed": 2e-3, "attention/q": 5e-4, "attention/k": 5e-4, "attention/v": 3e-4, "attention/o": 3e3, "latent/down": 2e-3}


def random_params(run, rng):
    """No parameter at its initial value: gains, taps and head gates are as random as matrices."""

    def one(name, at):
        if at.init == "ones":
            return 1 + 0.4 * rng.standard_normal(at.shape)
        if at.init == "identity":
            return 0.5 * rng.standard_normal(at.shape)
        scale = next((x for part, x in SCALES.items() if name.endswith(part)), 1)
        return rng.standard_normal(at.shape) * scale * (1 if name == "embed" else 1.2 / np.sqrt(at.shape[-2]))

    leaves = transformer.leaves(run)
    values = [one(name, at).astype(np.float32) for name, at in leaf.flatten(leaves).items()]
    return jax.tree.unflatten(jax.tree.structure(leaves, is_leaf=leaf.is_leaf), values)


def documents(run, rng):
    """Several documents a row, of other lengths in each; one row ends in padding."""
    b, s = run.data.batch_seqs, run.data.seq_len
    text = rng.integers(1, run.model.vocab, (b, s + 1)).astype(np.int32)
    start, valid = np.zeros((b, s), np.int32), np.ones((b, s), bool)
    for row, cuts in enumerate([(9, 11, 20), (1, 17), (3, 4, 5, 30), ()]):
        for at in cuts:
            start[row, at:], text[row, at] = at, 0
    valid[1, 27:] = False
    return Batch(text[:, :-1], text[:, 1:], start, valid)


@pytest.mark.parametrize("exchange", ["local", pytest.param("dense", marks=pytest.mark.slow)])
def test_the_network_is_the_reference_written_again(exchange):
    run = spec.override(runs.find("pocket"), [*TINY, f"routing.exchange={exchange}"])
    rng = np.random.default_rng(0)
    params, batch = random_params(run, rng), documents(run, rng)
    bias = rng.standard_normal((run.model.layers, run.moe.experts)).astype(np.float32)

    exact = jax.tree.map(lambda x: x.astype(np.float64), (params, bias))
    rows = [reference(*exact, *row, run) for row in zip(batch.tokens, batch.labels, batch.doc_start, strict=True)]
    nll, squared = (np.stack([row[i] for row in rows]) for i in (0, 1))
    assert min(row[2] for row in rows) > 1e-5  # rounding decides no expert

    mesh = meshes.make(run)
    with jax.set_mesh(mesh):
        held = leaf.tree_map(
            lambda at, x: jax.device_put(x, jax.sharding.NamedSharding(mesh, at.spec)), transformer.leaves(run), params
        )
        there = jax.tree.map(lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, meshes.B_S)), batch)
        losses, each = (jax.jit(partial(f, run=run))(held, bias, there) for f in (transformer.loss, transformer.nll))

    ok = batch.valid
    assert int(losses.sums.tokens) == ok.sum()
    mean = float(losses.sums.total) / ok.sum()
    np.testing.assert_allclose(mean, nll[ok].mean() + 1e-4 * squared[ok].mean(), rtol=1e-5)
    np.testing.assert_allclose(float(losses.sums.nll) / ok.sum(), nll[ok].mean(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(each)[ok], nll[ok], rtol=1e-5)
