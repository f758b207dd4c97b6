"""The collectives that a step needs, in closed form from the run alone: what a traced program is held against.

One `Need` per kind of traffic, phase, operation and axes; the formulas are in docs/method.md, section 12. Nothing here
looks at the program.
"""

import math
from dataclasses import dataclass

from argosy import spec
from argosy.plan import flops, hardware, work

FSDP = ("data", "expert")  # over these, attention, latent, shared, gates and readout are divided


@dataclass(frozen=True)
class Need:
    """Traffic of one kind in one step: `bytes` is the whole side on one device, summed over executions."""

    what: str
    phase: str
    op: str
    axes: tuple[str, ...]
    bytes: float | int


WEIGHTS, SCATTERED, SUMMED = "weights gathered", "gradients scattered", "gradients summed"
ROWS, SHARES, COUNTS, MATRICES = "expert rows", "combine weights", "expert counts", "whole matrices"
STATISTICS, NORMS = "statistics", "norms"


def axes(run: spec.Run, *names: str) -> tuple[str, ...]:
    """Those of the named mesh axes that divide anything, outer to inner."""
    return tuple(axis for axis in spec.AXES if axis in names and getattr(run.mesh, axis) > 1)


def ways(run: spec.Run, over: tuple[str, ...]) -> int:
    """Devices that a collective over these axes joins."""
    return math.prod(getattr(run.mesh, axis) for axis in over)


def needs(run: spec.Run) -> list[Need]:
    """Everything that a step must move between devices, but for sums of a few numbers (statistics, norms)."""
    return [need for need in (*_weights(run), *_gradients(run), *_rows(run), *_matrices(run)) if need.axes and need.bytes]


def _divided(run: spec.Run) -> dict[str, int]:
    """Parameters of the parts that are divided over data x expert: in the blocks, and outside them."""
    p = flops.params(run)
    outside = {"readout": p["readout"], "gated_norm": 4 * run.model.width * run.model.gate_rank}
    whole = sum(p[part] for part in work.FSDP)
    return {"all": whole, "blocks": whole - sum(outside.values()), "gates": p["gated_norm"] // 2}


def _weights(run: spec.Run) -> list[Need]:
    """Each divided weight is gathered for the forward pass, and again for every block that is recomputed.

    The second product of each norm's gate is always recomputed (`norm.gated_norm`), its weight gathered again.
    """
    over, size, n = axes(run, *FSDP), work.value_bytes(run) * run.compute.accumulate, _divided(run)
    again = n["gates"] + (n["blocks"] if run.compute.remat != "none" else 0)
    return [
        Need(WEIGHTS, "forward", "all-gather", over, size * n["all"]),
        Need(WEIGHTS, "recomputation", "all-gather", over, size * again),
    ]


def _gradients(run: spec.Run) -> list[Need]:
    """Gradients are summed over the devices whose tokens differ: scattered where a weight is divided, and the parts then
    summed over those that hold the same part. In the products' dtype; in float32 where the weight itself meets no
    product (embedding, gains, convolutions) and for the router, whose logits are float32."""
    p, size, times = flops.params(run), work.value_bytes(run), run.compute.accumulate
    over, divided = axes(run, *FSDP), _divided(run)["all"]
    everywhere = sum(p[part] for part in ("embed", "router", "norm", "conv"))
    return [
        Need(SCATTERED, "backward", "reduce-scatter", over, times * size * divided),
        Need(SUMMED, "backward", "all-reduce", axes(run, "replica", "context"), times * size * divided / ways(run, over)),
        Need(
            SUMMED,
            "backward",
            "all-reduce",
            axes(run, "replica", "data", "context"),
            times * size * p["routed"] / run.mesh.expert,
        ),
        Need(SUMMED, "backward", "all-reduce", axes(run, *spec.AXES), times * 4 * everywhere),
    ]


def pool(run: spec.Run) -> tuple[int, int]:
    """P and M: rows of a pool, and header rows before it, per sender, destination and wave (expert_parallel A1).

    >>> from argosy.runs import marin_535b
    >>> pool(marin_535b.run())
    (3141, 2)
    """
    r, assignments = run.routing, round(work.tokens(run) / run.compute.accumulate) * run.moe.experts_per_token
    rows = max(1, math.ceil(r.sender_capacity * assignments / (run.mesh.expert * r.waves)))
    rows = min(rows, -(-assignments // r.waves))
    return rows, math.ceil(rows / spec.expert_width(run.moe, run.model))


def sides(run: spec.Run) -> dict[str, tuple[int, int]]:
    """How often rows go out to experts and come back, per layer (and wave), by phase."""
    again = {"none": (0, 0), "block": (1, 1), "block_keep_dispatch": (0, 1)}[run.compute.remat]
    return {"forward": (1, 1), "recomputation": again, "backward": (1, 1)}


def _rows(run: spec.Run) -> list[Need]:
    """Rows to the experts and back: pools with their headers out, pools back; or every assignment as it is; or, with all
    ranks' tokens gathered, each token to every rank."""
    over, m = axes(run, "expert"), run.routing
    if work.gathered(run):
        return _gathered(run)
    width = spec.expert_width(run.moe, run.model) * work.value_bytes(run)
    per_layer = run.model.layers * run.compute.accumulate
    found = []
    for phase, (out, back) in sides(run).items():
        if m.exchange == "pooled_wave":
            rows, header = pool(run)
            size = m.waves * run.mesh.expert * (out * (rows + header) + back * rows) * width
            found.append(Need(ROWS, phase, "all-to-all", over, per_layer * size))
        elif m.exchange == "ragged":
            rows = round(work.tokens(run) / run.compute.accumulate) * run.moe.experts_per_token
            found.append(Need(ROWS, phase, "ragged-all-to-all", over, per_layer * (out + back) * rows * width))
    return found


def _gathered(run: spec.Run) -> list[Need]:
    """Tokens and their combine weights gathered, float32 sums scattered; backward the other way round."""
    over, t = axes(run, "expert"), work.tokens(run) * run.model.layers * run.mesh.expert
    z, k, v = spec.expert_width(run.moe, run.model), run.moe.experts_per_token, work.value_bytes(run)
    gather, scatter = "all-gather", "reduce-scatter"
    found = [
        Need(ROWS, "backward", gather, over, t * z * 4),
        Need(ROWS, "backward", scatter, over, t * z * v),
        Need(SHARES, "backward", scatter, over, t * k * 4),
    ]
    for phase, (out, back) in sides(run).items():
        if phase != "backward":
            again = 1 if back else 0  # what routes the tokens is not kept: recomputed with the rest of the block
            found += [
                Need(ROWS, phase, gather, over, out * t * z * v),
                Need(ROWS, phase, scatter, over, back * t * z * 4),
                Need(SHARES, phase, gather, over, again * t * k * 4),
            ]
    return found


def gathered_elements(run: spec.Run) -> dict[int, str]:
    """Elements of one gather or scatter of `_gathered`, and what it is for: a part's tokens, all ranks', one after another."""
    t = round(work.tokens(run) / run.compute.accumulate) * run.mesh.expert // work.parts(run)
    return {t * run.moe.experts_per_token: SHARES, t * spec.expert_width(run.moe, run.model): ROWS}


def ragged_elements(run: spec.Run) -> tuple[int, int]:
    """Elements of the smaller of a ragged all-to-all's two buffers, and those that travel on average: how many do is
    data. A device's assignments in `waves` chunks; a chunk's buffer has `receiver_capacity` times its mean load."""
    r, width = run.routing, spec.expert_width(run.moe, run.model)
    assignments = round(work.tokens(run) / run.compute.accumulate) * run.moe.experts_per_token
    most = min(run.mesh.expert * assignments, max(1, math.ceil(r.receiver_capacity * assignments / r.waves)))
    return min(assignments, most) * width, assignments * width // r.waves


def _matrices(run: spec.Run) -> list[Need]:
    """Matrices are made whole for Newton-Schulz and divided again, in float32: each device takes whole ones of each leaf,
    as many as the one that has most of them."""
    if run.optim.rule == "adamw":
        return []
    m, moe, over = run.model, run.moe, axes(run, *FSDP)
    d, layers = m.width, m.layers
    stacks = [(layers, d * m.heads * m.head_width)] * 2 + [(layers, d * m.kv_heads_local * m.head_width)] * 2
    stacks += [(layers, d * m.gate_rank)] * 4 + [(1, d * m.gate_rank)] * 4
    stacks += [(layers, d * moe.latent_width)] * 2 if moe.latent != "none" else []
    stacks += [(layers * moe.shared_experts, d * moe.shared_hidden)] * 3
    mine = sum(math.ceil(count / ways(run, over)) * size for count, size in stacks)
    return [Need(MATRICES, "optimizer", "all-to-all", over, 2 * 4 * mine)]


# ---- links ---------------------------------------------------------------------------------------


def inside(run: spec.Run, over: tuple[str, ...]) -> int:
    """How many of a group's devices share one scale-up domain. Axes nest, inner to outer, as expert, context, data, replica.

    >>> from argosy.runs import marin_535b
    >>> inside(marin_535b.run(), ("expert",)), inside(marin_535b.run(), ("replica", "expert")), inside(marin_535b.run(), ("replica",))
    (64, 64, 1)
    """
    domain, reach, joined = hardware.chip(run.compute.chip).domain, 1, 1
    for axis in ("expert", "context", "data", "replica"):
        size = getattr(run.mesh, axis)
        here = max(n for n in range(1, size + 1) if size % n == 0 and (n == 1 or reach * n <= domain))
        joined *= here if axis in over else 1
        reach *= here
        if here < size:
            break
    return joined


def sent(run: spec.Run, op: str, over: tuple[str, ...], size: float | int) -> tuple[float, float]:
    """Bytes that one device sends inside its domain and across domains for `size` bytes of an operation's whole side.

    Rings inside the domain and, with what each device then holds, between domains (docs/method.md, section 12).
    """
    n, m = ways(run, over), inside(run, over)
    q = n // m
    if op in ("all-to-all", "ragged-all-to-all"):
        return size * (m - 1) / n, size * (n - m) / n
    if op == "all-reduce":
        return 2 * size * (m - 1) / m, 2 * size * (q - 1) / q / m
    if op in ("all-gather", "reduce-scatter"):
        return size * (m - 1) / m, size * (q - 1) / q / m
    return (size, 0.0) if q == 1 else (0.0, size)


def time_s(run: spec.Run, op: str, over: tuple[str, ...], size: float | int) -> float:
    """Seconds of that traffic at the chip's rated rates."""
    chip, (near, far) = hardware.chip(run.compute.chip), sent(run, op, over, size)
    return near / chip.scale_up_bytes_per_s + far / chip.scale_out_bytes_per_s


def link(run: spec.Run, over: tuple[str, ...]) -> str:
    """Which link the slowest part of a collective over these axes takes."""
    return "inside the rack" if inside(run, over) == ways(run, over) else "across racks"
