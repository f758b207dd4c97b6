"""Memory of one device and of its share of the host, by kind, in the three tight moments of a step."""

from argosy import spec
from argosy.plan import hardware, work

GIB = 2**30
# Share of a block's values and their gradients that the compiler holds at once in the block's backward pass. Fitted
# to one published peak, 137.95 GiB (marin#8753): see bench/plan.py.
LIVE = 0.78
# Share of the routed experts' arrays in pinned host memory that a latency-hiding scheduler has already copied to the
# device when the backward pass is at its fullest: 4 of 6 in the published buffer assignment (marin#8508). The ragged
# transport ran without that scheduler (marin#8753). Our update asks for one leaf after another, once the gradients are
# there (`train.host`); whether that holds a scheduler back has not been measured, so this and the update stay on the safe side.
PREFETCHED = 4 / 6
# Share of a device's memory that a program can have: the collectives' buffers, libraries and context took 28.6 of
# 184.3 GiB (marin#8490).
USABLE = 1 - 28.6 / 184.3


def steady(run: spec.Run) -> dict[str, dict[str, float]]:
    """Bytes that stay between steps, by place (`device`, `host`) and kind.

    `params` are the weights that the forward pass reads; `masters` are the float32 copies of those that are bfloat16;
    `optimizer_state` is one float32 number per element of a MuonH matrix and two of everything else.
    """
    c, low = run.compute, work.low(run) if run.compute.params == "bf16" else 0.0
    found: dict[str, dict[str, float]] = {"device": {"params": 4.0 * sum(work.held(run).values()) - 2.0 * low}, "host": {}}
    for kind, size, place in (
        ("masters", 4.0 * low, c.masters),
        ("optimizer_state", 4.0 * work.state_words(run), c.optimizer_state),
    ):
        if size:
            found["host" if place == "pinned_host" else "device"][kind] = size
    return found


def block(run: spec.Run) -> dict[str, float]:
    """Values per token of one block, by kind: what its backward pass needs if nothing is recomputed.

    Gathered over ranks (`work.gathered`), `dispatched` are all ranks' tokens and `returned` one part's room for all their
    assignments.
    """
    m, moe, d = run.model, run.moe, run.model.width
    heads, kv = m.heads * m.head_width, m.kv_heads_local * m.head_width
    computed, sent = work.rows(run)
    latent = spec.expert_width(moe, m)
    conv = m.convolution != "none"
    attention = 3 * d + 4 * heads + (3 if conv else 2) * kv + (d if conv else 0)
    mlp = 3 * d + (d if conv else 0) + moe.shared_experts * (3 * moe.shared_hidden + d)
    if moe.latent != "none":
        mlp += 3 * latent + d
    if work.gathered(run):
        return {
            "dense": float(attention + mlp),
            "dispatched": sent * latent,
            "returned": sent * moe.experts_per_token * latent / work.parts(run),
            "hidden": 3 * moe.hidden * computed,
        }
    most = float(run.mesh.expert * run.routing.waves)  # all that all ranks have, in each chunk
    buffered = max(sent, computed) if run.routing.exchange != "ragged" else sent * min(run.routing.receiver_capacity, most)
    return {
        "dense": float(attention + mlp),
        "dispatched": buffered * latent,
        "returned": buffered * latent,
        "hidden": 3 * moe.hidden * buffered / work.expert_chunks(run),
    }


def moments(run: spec.Run) -> dict[str, dict[str, float]]:
    """Bytes on the device by kind at three moments: the loss, the first block's backward pass, the update.

    The largest is the peak. `saved` are the values kept from the forward pass for all layers, `block` the values and
    gradients of the block at work, `gathered` whole weights of divided leaves, `prefetched` what came early from the
    host; with accumulation `gradients` are those of one part of the batch, `accumulated` the sum so far, `margins` those
    counted so far and in one more part (`model.parts`). Sources: the constants of this module.
    """
    t = work.tokens(run) / run.compute.accumulate
    size, values, stay = work.value_bytes(run), block(run), steady(run)
    mine, d, vocab = work.held(run), run.model.width, run.model.vocab
    device, host = stay["device"], stay["host"]
    dispatch = values["dispatched"] if run.routing.exchange not in ("dense", "local") else 0.0
    kept = {"none": sum(values.values()), "block": float(d), "block_keep_dispatch": d + dispatch}[run.compute.remat]
    saved = t * size * run.model.layers * kept
    parts = run.compute.accumulate > 1
    summed = {"accumulated": 4.0 * sum(mine.values()), "margins": 2 * 4.0 * work.margin_counts(run)} if parts else {}
    gradients = work.gradient_bytes(run)
    ways = run.mesh.data * run.mesh.expert
    divided = sum(n for part, n in mine.items() if part in work.FSDP and part != "readout") * ways / run.model.layers
    both = values["dispatched"] + values["returned"] + values["hidden"]  # the gradients of all three meet them
    again = both if run.compute.remat == "none" else sum(values.values()) + both
    late = 0.0 if run.routing.exchange == "ragged" else PREFETCHED * 4 * _routed_words_on_host(run) * mine["routed"]
    largest = max(mine["routed"], mine["attention"], mine["shared"]) / 3 / run.model.layers
    # gathered in parts: a layer's routed weights and their gradients, in float32 whatever they are otherwise
    summing = 2 * 4.0 * mine["routed"] / run.model.layers if work.gathered(run) and work.parts(run) > 1 else 0.0
    logits = min(t, run.compute.readout_block_tokens) * vocab * 4.0 * 2
    return {
        "loss": {
            **device,
            **summed,
            "saved": saved,
            "readout": (d * vocab * (size + 4.0) if ways > 1 else d * vocab * 4.0) + logits + 2 * t * d * size,
        },
        "backward": {
            **device,
            **summed,
            "gradients": gradients,
            "saved": saved,
            "block": LIVE * t * size * (again + 2 * d) + summing,
            "gathered": 2 * divided * size if ways > 1 else 0.0,
            **({"prefetched": late} if late else {}),
        },
        "update": {
            **device,
            "gradients": summed.get("accumulated", gradients),
            **host,
            "iterates": largest * (4.0 + 3 * 2.0),
        },
    }


def _routed_words_on_host(run: spec.Run) -> int:
    """Numbers per routed weight that lie in host memory."""
    c = run.compute
    masters = c.params == "bf16" and c.masters == "pinned_host"
    return masters + (c.optimizer_state == "pinned_host") * (2 if run.optim.rule == "adamw" else 1)


def plan(run: spec.Run) -> dict:
    """The fullest moment by kind and place, and whether it fits.

    `device` and `host` map kinds to bytes; `total` of each is their sum. `fits` asks the device's usable share
    (`USABLE`) and the host's memory.
    """
    chip, all_moments = hardware.chip(run.compute.chip), moments(run)
    fullest = max(all_moments, key=lambda name: sum(all_moments[name].values()))
    device, host = all_moments[fullest], steady(run)["host"]
    usable = USABLE * chip.memory_bytes
    return {
        "per_device_bytes": {
            "device": {**device, "total": sum(device.values())},
            "host": {**host, "total": sum(host.values())},
        },
        "fullest_moment": fullest,
        "moments_bytes": {name: sum(kinds.values()) for name, kinds in all_moments.items()},
        "steady_device_bytes": sum(steady(run)["device"].values()),
        "device_usable_bytes": usable,
        "host_usable_bytes": chip.host_bytes,
        "fits": sum(device.values()) <= usable and sum(host.values()) <= (chip.host_bytes or usable),
    }
