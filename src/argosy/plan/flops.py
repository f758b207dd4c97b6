"""Parameters and FLOPs of a run in closed form (reference_run 1.3, 1.4): exact whole numbers."""

from argosy import spec

CONVENTION = (
    "per token: attention with all stored key/value heads, router, the chosen experts, latent and shared;"
    " without embedding, readout, gates, norms and convolutions"
)


def params(run: spec.Run) -> dict[str, int]:
    """Parameters by part, the names of `Leaf.part`; their sum is the total.

    `norm` holds every RMS gain, the latent one with them. `router_bias` has no `Leaf`: it is state that the
    optimizer never meets, but the reference counts it, and so does the total.

    >>> from argosy.runs import marin_535b
    >>> sum(params(marin_535b.run()).values())
    535477106688
    """
    m, moe = run.model, run.moe
    d, layers, latent = m.width, m.layers, spec.expert_width(moe, m)
    heads, stored = m.heads * m.head_width, m.kv_heads_local * m.head_width
    has_latent, has_conv = moe.latent != "none", m.convolution != "none"
    return {
        "embed": m.vocab * d,
        "readout": d * m.vocab,
        "attention": layers * (2 * d * heads + 2 * d * stored),
        "head_gate": layers * d * m.heads if m.head_gate != "none" else 0,
        "router": layers * d * moe.experts,
        "latent": layers * 2 * d * latent if has_latent else 0,
        "routed": layers * moe.experts * 3 * latent * moe.hidden,
        "shared": layers * moe.shared_experts * 3 * d * moe.shared_hidden,
        "gated_norm": (2 * layers + 2) * 2 * d * m.gate_rank,
        "norm": (2 * layers + 2) * d + (layers * latent if has_latent else 0),
        "conv": layers * m.conv_taps * (stored + 2 * d) if has_conv else 0,
        "router_bias": layers * moe.experts if run.routing.balance != "aux_loss" else 0,
    }


def active(run: spec.Run) -> int:
    """Active parameters by `CONVENTION`: the count that sets the horizon and names the run.

    >>> from argosy.runs import marin_535b
    >>> active(marin_535b.run())
    22762487808
    """
    p, moe = params(run), run.moe
    chosen = p["routed"] // moe.experts * moe.experts_per_token
    return p["attention"] + p["router"] + chosen + p["latent"] + p["shared"]


def active_variants(run: spec.Run) -> dict[str, int]:
    """Active parameters by wider conventions, each holding the one before it."""
    p = params(run)
    with_readout = active(run) + p["readout"]
    with_gates = with_readout + p["head_gate"] + p["gated_norm"] + p["norm"] + p["conv"] + p["router_bias"]
    return {
        "active": active(run),
        "+ readout": with_readout,
        "+ gates, norms, convolutions": with_gates,
        "+ embedding": with_gates + p["embed"],
    }


def forward_per_token(run: spec.Run, *, readout: bool) -> int:
    """FLOPs of one token's forward pass by the reference's formula.

    Attention is counted over the whole window or sequence, not halved for causality, with 3 per score for mask and
    softmax; local layers use their key/value heads, global layers theirs. Gates, norms and convolutions count 0.
    The reference's own constant for its width 2,048 took 5 of the 6 global layers for global and is 0.53% lower.
    """
    m, moe, d = run.model, run.moe, run.model.width
    latent = spec.expert_width(moe, m)
    heads = m.heads * m.head_width
    block = routed_per_token(run) + 6 * d * moe.shared_hidden * moe.shared_experts
    block += 2 * d * moe.experts + 2 * heads * d + (4 * d * latent if moe.latent != "none" else 0)
    total = m.layers * block
    for layer in range(m.layers):
        wide = spec.is_global(m, layer)
        kv = (m.kv_heads_global if wide else m.kv_heads_local) * m.head_width
        seen = run.data.seq_len if wide else min(run.data.seq_len, m.window)
        total += 2 * d * (heads + 2 * kv) + m.heads * seen * (4 * m.head_width + 3)
    return total + (2 * d * m.vocab if readout else 0)


def routed_per_token(run: spec.Run) -> int:
    """FLOPs of one token's chosen experts in one layer's forward pass."""
    return 6 * spec.expert_width(run.moe, run.model) * run.moe.hidden * run.moe.experts_per_token


def accepted(run: spec.Run, drop_fraction: float) -> float:
    """The share of a step's FLOPs, readout included, that is left when this share of assignments is dropped.

    >>> from argosy.runs import marin_535b
    >>> round(accepted(marin_535b.run(), 0.034), 4)
    0.9852
    """
    routed = run.model.layers * routed_per_token(run) / forward_per_token(run, readout=True)
    return 1 - drop_fraction * routed


def train_step(run: spec.Run, *, readout: bool) -> int:
    """FLOPs of one optimizer step: three times forward, over all tokens of the batch. Recomputation counts 0.

    >>> from argosy.runs import marin_535b
    >>> float(train_step(marin_535b.run(), readout=False))
    6.690294608796058e+18
    """
    return 3 * forward_per_token(run, readout=readout) * spec.tokens_per_step(run)


def train(run: spec.Run, *, readout: bool) -> int:
    """FLOPs of the whole run: its steps times a step's."""
    return spec.steps(run) * train_step(run, readout=readout)
