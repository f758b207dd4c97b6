"""What one device does in one optimizer step: products, bytes through its memory, bytes over its links.

Counts of what a run asks of the hardware, recomputation and padding included; `flops` has the model's own. All per
device and optimizer step. The operations counted are those of the architecture (reference_run 1.2) and of the
transports (expert_parallel A1, A2): each reads its inputs and writes its outputs once.
"""

import math
from dataclasses import dataclass

from argosy import spec
from argosy.plan import flops

NEWTON_SCHULZ_STEPS = 5
MARGIN_PASSES = 12  # reads and writes of the counted margins for each part of a batch: filled, summed, moved, added
# Packed documents hide most of a long sequence from a token: the share of tokens whose document is longer than n is
# 1 up to this length and then falls as 1/n. Fitted to the ratio of the two published context costs (bench/plan.py).
DOCUMENT_TOKENS = 4096
GATHERED_ROWS = 2**18  # room for one part's assignments: 1.6 GB at the reference run's latent width in bfloat16

FSDP = ("attention", "head_gate", "latent", "shared", "gated_norm", "readout")  # divided over data x expert
PLAIN = ("embed", "norm", "conv")  # float32 whatever compute.params is: read in float32, and stepped by Adam
MATRICES = ("attention", "latent", "routed", "shared", "gated_norm")  # stepped by MuonH


@dataclass(frozen=True)
class Work:
    """One device's step. FLOPs, and bytes by the link they cross; each byte count is one direction's."""

    products: float  # FLOPs of matrix products, optimizer included
    attention: float  # FLOPs of scores and values
    memory: float  # bytes read and written outside the products
    expert: float  # rows over the expert axis, to experts and back
    fsdp: float  # weights gathered and gradients scattered over data x expert
    context: float  # keys and values gathered over the context axis
    reduce: float  # gradients summed over the axes that do not divide a weight
    host: float  # masters and optimizer state, in and out


def value_bytes(run: spec.Run) -> int:
    """Bytes of one activation."""
    return 2 if run.compute.precision == "bf16" else 4


def tokens(run: spec.Run) -> float:
    """Tokens of one device in one optimizer step."""
    return spec.tokens_per_step(run) / spec.devices(run)


def divisor(run: spec.Run, part: str) -> int:
    """Over how many devices a part's parameters are divided."""
    if part == "routed":
        return run.mesh.expert
    return run.mesh.data * run.mesh.expert if part in FSDP else 1


def held(run: spec.Run) -> dict[str, float]:
    """Parameters that one device holds, by part; the router's bias is state and left out."""
    return {part: n / divisor(run, part) for part, n in flops.params(run).items() if part != "router_bias"}


def passes(run: spec.Run) -> int:
    """Forward-sized passes through a block: forward, backward as two, and the recomputation if any."""
    return 3 if run.compute.remat == "none" else 4


def gathered(run: spec.Run) -> bool:
    """Whether a training step sees whole groups' tokens on every rank: dropless, through a transport between ranks."""
    return run.routing.capacity == "dropless" and run.routing.exchange in ("pooled_wave", "ragged")


def gathered_parts(tokens: int, k: int, ranks: int) -> int:
    """Into how many equal parts each rank's `tokens` are cut, so that no part needs room for more than `GATHERED_ROWS` rows:
    all assignments of all ranks' tokens may come to one of them.

    At the reference run's evaluation, one sequence to a device, and its training batch:

    >>> gathered_parts(4096, 8, 64), gathered_parts(65_536, 8, 64)
    (8, 128)
    """
    fitting = (n for n in range(1, tokens + 1) if tokens % n == 0 and tokens // n * k * ranks <= GATHERED_ROWS)
    return next(fitting, tokens)


def parts(run: spec.Run) -> int:
    """`gathered_parts` of one part of a run's training batch."""
    return gathered_parts(round(tokens(run) / run.compute.accumulate), run.moe.experts_per_token, run.mesh.expert)


def rows(run: spec.Run) -> tuple[float, float]:
    """Expert rows per token as (computed, transported): padding to capacity counts, refused rows do not.

    Capacity ends where everything that can come has room: all of a device's rows at one destination, all at one expert.
    Gathered, a token itself is transported, once to each rank; what is beyond `receiver_capacity` is not counted.
    """
    r, moe = run.routing, run.moe
    if gathered(run):
        return moe.experts_per_token * min(r.receiver_capacity, float(moe.experts)), float(run.mesh.expert)
    if r.exchange == "dense":
        return float(moe.experts) / run.mesh.expert, 0.0
    if r.exchange == "ragged":
        return float(moe.experts_per_token), float(moe.experts_per_token)
    if r.capacity != "bounded":
        sender = receiver = 1.0
    else:
        sender = min(r.sender_capacity, float(run.mesh.expert)) if r.exchange == "pooled_wave" else 1.0
        receiver = min(r.receiver_capacity, sender * (moe.experts // run.mesh.expert))
    return moe.experts_per_token * receiver, 0.0 if r.exchange == "local" else moe.experts_per_token * sender


def expert_chunks(run: spec.Run) -> int:
    """Into how many parts, one after another, a device's expert rows are cut."""
    return run.routing.waves if run.routing.exchange in ("pooled_wave", "ragged") else 1


def keys_seen(run: spec.Run) -> dict[bool, float]:
    """Mean keys that a query meets in a local (False) and a global (True) layer: causal, windowed, in its document.

    >>> from argosy.runs import marin_535b
    >>> keys_seen(marin_535b.run())
    {False: 1536.0, True: 2048.0}
    """
    s, w = run.data.seq_len, min(run.model.window, run.data.seq_len)
    in_window = w * (1 - w / (2 * s))
    in_documents = s / 2 if s <= DOCUMENT_TOKENS else DOCUMENT_TOKENS / 2 * (1 + math.log(s / DOCUMENT_TOKENS))
    return {False: min(in_window, in_documents), True: in_documents}


def step(run: spec.Run) -> Work:
    """The work of one device in one optimizer step."""
    t, n, size = tokens(run), run.model.layers, value_bytes(run)
    computed, sent = rows(run)
    latent = spec.expert_width(run.moe, run.model)
    blocks = n * passes(run) * (_dense_products(run) + 6 * latent * run.moe.hidden * computed)
    readout = 3 * 2 * run.model.width * run.model.vocab  # the blocked loss repeats no product
    if gathered(run):
        expert = t * n * sum(gathered_sides(run).values())
    else:
        sides = {"none": 4, "block": 6, "block_keep_dispatch": 5}[run.compute.remat]  # all-to-alls per layer
        expert = t * n * sides * sent * latent * size
    return Work(
        products=t * (blocks + readout) + _newton_schulz(run),
        attention=t * _attention(run) * (3.5 if run.compute.remat == "none" else 4.5),
        memory=t * (n * passes(run) * _block_traffic(run) + _readout_traffic(run))
        + _weights_traffic(run)
        + _update_traffic(run),
        expert=expert * (run.mesh.expert - 1) / run.mesh.expert,
        fsdp=_fsdp(run),
        context=_context(run),
        reduce=_reduce(run),
        host=_host(run),
    )


def gathered_sides(run: spec.Run) -> dict[tuple[str, str], float]:
    """Bytes per token and layer of what is gathered over ranks and scattered back, whole sides, by phase and operation.

    Tokens travel in their own dtype, sums and combine weights in float32, experts' numbers in int32, `valid` as a byte. The
    backward pass is the transpose: gradients of sums are gathered, those of tokens and combine weights scattered.
    """
    ranks, k, latent, size = run.mesh.expert, run.moe.experts_per_token, spec.expert_width(run.moe, run.model), value_bytes(run)
    out, back, about = latent * size, latent * 4, 4 * k + 4 * k + 1
    again = {"none": (0, 0), "block": (out + about, back), "block_keep_dispatch": (about, back)}[run.compute.remat]
    return {
        ("forward", "all-gather"): float(ranks * (out + about)),
        ("forward", "reduce-scatter"): float(ranks * back),
        ("recomputation", "all-gather"): float(ranks * again[0]),
        ("recomputation", "reduce-scatter"): float(ranks * again[1]),
        ("backward", "all-gather"): float(ranks * back),
        ("backward", "reduce-scatter"): float(ranks * (out + 4 * k)),
    }


def _dense_products(run: spec.Run) -> int | float:
    """FLOPs per token of a block's forward products, without routed experts and attention scores."""
    m, moe, d = run.model, run.moe, run.model.width
    wide = sum(spec.is_global(m, i) for i in range(m.layers)) / m.layers
    kv = (wide * m.kv_heads_global + (1 - wide) * m.kv_heads_local) * m.head_width
    latent = 4 * d * moe.latent_width if moe.latent != "none" else 0
    gates = 8 * d * m.gate_rank + (2 * d * m.heads if m.head_gate != "none" else 0)
    shared = 6 * d * moe.shared_hidden * moe.shared_experts
    return 4 * d * m.heads * m.head_width + 4 * d * kv + 2 * d * moe.experts + latent + gates + shared


def _attention(run: spec.Run) -> float:
    """FLOPs per token of one forward pass through all layers' scores and values, hidden keys skipped."""
    m, seen = run.model, keys_seen(run)
    return sum(4 * m.heads * m.head_width * seen[spec.is_global(m, i)] for i in range(m.layers))


def _block_traffic(run: spec.Run) -> int | float:
    """Bytes per token that one pass of a block moves outside its products."""
    m, moe, size = run.model, run.moe, value_bytes(run)
    d, heads, kv = m.width, m.heads * m.head_width, m.kv_heads_local * m.head_width
    computed, sent = rows(run)
    latent = spec.expert_width(moe, m)
    conv = 2 if m.convolution != "none" else 0
    norms = 2 * 7 * d  # norm read and written; gate read, its hidden read, written, multiplied
    attention = (2 + 2 + 2 + 2) * heads + (2 + 2 + conv) * kv  # rotation and norm, kernel, exclusive output, head gate
    shared = moe.shared_experts * (3 * moe.shared_hidden + d) + d
    branches = 2 * (conv + 3) * d  # convolution and residual sum of both branches
    latents = 2 * latent if moe.latent != "none" else 0
    # Rows: read and written by the send-side gather, both all-to-alls, the receiver's compaction and expansion
    # (where rows are padded), and read by the weighted sum.
    moves = {"pooled_wave": 2 + 4 + 4 + 1, "ragged": 2 + 4 + 1, "local": 2 + 1, "dense": 0}[run.routing.exchange]
    moved = moves * max(sent, min(computed, 2.0 * moe.experts_per_token))
    if gathered(run):  # of every rank's token: itself gathered, its float32 sum, room for all its rows, zeroed and read twice
        moved = 3 * computed + sent * (2 + 2 * 4 / size + 3 * moe.experts_per_token)
    routed = moved * latent + 3 * computed * moe.hidden
    routing = 20 * moe.experts * 4  # float32 scores: bias, top-k, sigmoid, margins, histogram
    return size * (norms + attention + shared + branches + latents + routed) + routing


def _readout_traffic(run: spec.Run) -> int:
    """Bytes per token of the logits: written and read by the loss, then their gradient."""
    return 4 * 4 * run.model.vocab


def low(run: spec.Run) -> float:
    """Parameters that one device holds in bfloat16 with `compute.params=bf16`, and whose masters are apart."""
    return sum(n for part, n in held(run).items() if part not in PLAIN)


def weight_uses(run: spec.Run) -> int:
    """How often a step needs each weight: forward, backward, and recomputation if any, for every part of the batch."""
    return run.compute.accumulate * (2 if run.compute.remat == "none" else 3)


def _weights_traffic(run: spec.Run) -> float:
    """Bytes of rounding float32 weights before their products, and of adding up what the batch's parts give."""
    c, mine = run.compute, sum(held(run).values())
    rounded = (4 + 2) * low(run) * weight_uses(run) if c.precision == "bf16" and c.params == "fp32" else 0.0
    if gathered(run) and parts(run) > 1:  # routed weights rounded for each part, its gradients added to those in float32
        rounded += held(run)["routed"] * parts(run) * ((4 + value_bytes(run)) * weight_uses(run) + 3 * 4 * c.accumulate)
    if c.accumulate == 1:
        return rounded
    return rounded + c.accumulate * (2 * 4 * mine + gradient_bytes(run) + MARGIN_PASSES * 4 * margin_counts(run))


def margin_counts(run: spec.Run) -> int:
    """Counters of all layers' margins on one device: at least `histogram_bins` edges per expert, at most twice as many."""
    if run.routing.balance != "quantile":
        return 0
    return run.model.layers * run.moe.experts * (2 * run.routing.histogram_bins + 3)


def gradient_bytes(run: spec.Run) -> float:
    """Bytes of one device's gradients as the backward pass gives them: those of bfloat16 weights are bfloat16."""
    return 4.0 * sum(held(run).values()) - (2.0 * low(run) if run.compute.params == "bf16" else 0.0)


def _update_traffic(run: spec.Run) -> float:
    """Bytes of the optimizer's update: weights, state and gradients in float32, and the iterates."""
    mine = held(run)
    matrices = sum(mine[p] for p in MATRICES)
    iterates = NEWTON_SCHULZ_STEPS * 6 * 2 * matrices if run.optim.rule != "adamw" else 0
    return 4 * (3 * sum(mine.values()) + 2 * state_words(run)) + iterates


def state_words(run: spec.Run) -> float:
    """Numbers of optimizer state that one device holds: momentum for a MuonH matrix, two moments for the rest."""
    mine = held(run)
    matrices = sum(mine[p] for p in MATRICES)
    return 2 * (sum(mine.values()) - matrices) + matrices * (2 if run.optim.rule == "adamw" else 1)


def _newton_schulz(run: spec.Run) -> int | float:
    """FLOPs of orthogonalising this device's share of the matrices: 5 (4 m^2 n + 2 m^3) for m x n, m <= n."""
    if run.optim.rule == "adamw":
        return 0.0
    m, moe, d = run.model, run.moe, run.model.width
    latent = spec.expert_width(moe, m)
    heads, kv = m.heads * m.head_width, m.kv_heads_local * m.head_width
    shapes = [
        (d, heads, 2 * m.layers, "attention"),
        (d, kv, 2 * m.layers, "attention"),
        (d, m.gate_rank, 2 * (2 * m.layers + 2), "gated_norm"),
        (d, moe.shared_hidden, 3 * moe.shared_experts * m.layers, "shared"),
        (latent, moe.hidden, 3 * moe.experts * m.layers, "routed"),
    ]
    if moe.latent != "none":
        shapes.append((d, latent, 2 * m.layers, "latent"))
    total = 0.0
    for a, b, count, part in shapes:
        short, long = min(a, b), max(a, b)
        total += NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3) * count / divisor(run, part)
    return total


def _fsdp(run: spec.Run) -> float:
    """Weights gathered once per forward-sized use, gradients scattered once, for each accumulation."""
    ways = run.mesh.data * run.mesh.expert
    whole = value_bytes(run) * sum(n for part, n in flops.params(run).items() if part in FSDP)
    return weight_uses(run) * whole * (ways - 1) / ways


def _context(run: spec.Run) -> float:
    """Keys and values of the other context shards, in every pass, and their gradients back."""
    m, others = run.model, run.mesh.context - 1
    return others * tokens(run) * m.layers * passes(run) * 2 * m.kv_heads_local * m.head_width * value_bytes(run)


def _reduce(run: spec.Run) -> float:
    """Bytes of summing gradients, in the compute dtype, over the devices that hold the same weights (ring), for each part."""
    total = 0.0
    for part, mine in held(run).items():
        copies = spec.devices(run) // divisor(run, part)
        total += 2 * (copies - 1) / copies * mine * value_bytes(run)
    return run.compute.accumulate * total


def _host(run: spec.Run) -> float:
    """Bytes from pinned host memory to the device in a step; as many go back."""
    c = run.compute
    masters = 4 * low(run) if c.params == "bf16" and c.masters == "pinned_host" else 0.0
    return masters + (4 * state_words(run) if c.optimizer_state == "pinned_host" else 0.0)
