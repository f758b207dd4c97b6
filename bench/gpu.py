"""What only an accelerator can say: attention's paths, the ragged transport, the experts' rate. One prepared script.

    python bench/gpu.py                  # all tables, on all GPUs that are here; minutes
    python bench/gpu.py --only attention
    python bench/gpu.py --tiny           # small shapes on any backend: shows that the script runs, and measures nothing

1. Attention: `attend.attend` beside cuDNN's and Pallas' kernels, none with a bias of S x S. Cases are one or several
   documents in a sequence, with and without a window; a path is left out of a case that it cannot express, and the
   reason is printed. Differences are of the outputs and of the gradients to q, k and v, beside ours in float32.
2. Ragged: every way of carrying rows and of multiplying experts against `dense`, float32, outputs and gradients.
3. Chunk: the experts' products of one chunk of the reference's ragged transport (3 experts of 3072 x 3072, the buffer of
   301,466 rows), as padded batched products and as `ragged_dot`, with even and with uneven loads. XLA:GPU writes
   `ragged_dot` out as products of all rows with every expert, unless it is told to use grouped ones: run this table
   again with XLA_FLAGS=--xla_gpu_experimental_use_ragged_dot_fusion=true to see what `ragged.how` then chooses.
4. Experts: one sparse layer of the reference's rung d2048 in bf16, its routed part alone, for each transport: tokens/s
   forward and forward + backward, MFU of the chip's rated FLOPs, and the share of the product rate measured here just
   before. Work counts the K experts of each token alone: padding and what is dropped are no work done.

Times are medians of repeated calls after two to warm up. Run it alone on the machine.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from argosy import mesh, spec
from argosy.model import attend, router
from argosy.model.exchange import dense, layout, local, pooled_wave, ragged
from argosy.model.experts import Routed, swiglu
from argosy.plan import hardware
from argosy.runs import marin_535b, pocket

WAYS = tuple(ragged.How(move, form) for move in ("ragged_all_to_all", "gather") for form in ("ragged_dot", "padded"))


def seconds(call: Callable[[], Any], at_least_s: float) -> float:
    """The median time of a call, over at least three and as many as fill `at_least_s`."""
    for _ in range(2):
        jax.block_until_ready(call())
    found: list[float] = []
    while len(found) < 3 or sum(found) < at_least_s:
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def both(f: Callable) -> Callable:
    """`f` and its gradients to all of its arguments for the cotangent that comes first."""

    def run(g: jax.Array, *args: Any) -> Any:
        y, pull = jax.vjp(f, *args)
        return y, pull(g.astype(y.dtype))

    return jax.jit(run)


def apart(got: Any, expected: Any) -> float:
    """The largest relative difference of two trees' leaves: norm of the difference over norm."""

    def one(a: jax.Array, b: jax.Array) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    return max(map(one, jax.tree.leaves(got), jax.tree.leaves(expected)))


def reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:110]}"


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


# ---- attention -------------------------------------------------------------------------------------


def attention(args: argparse.Namespace) -> None:
    m = marin_535b.model(2048)
    b, s, h, n, a = (2, 128, 4, 2, 32) if args.tiny else (4, 4096, m.heads, m.kv_heads_local, m.head_width)
    window, blocks = (32, (64,)) if args.tiny else (m.window, (256, 512, 1024))
    dtype = jnp.bfloat16
    q, k, v = normal(0, b, s, h, a, dtype=dtype), normal(1, b, s, n, a, dtype=dtype), normal(2, b, s, n, a, dtype=dtype)
    g = normal(3, b, s, h, a, dtype=dtype)
    print(f"\nattention: B {b}, S {s}, heads {h}, key/value heads {n}, width {a}, bfloat16; window {window}")
    print(f"  {'case':<24}{'path':<34}{'forward ms':>11}{'+ backward':>11}{'TFLOP/s':>9}{'y':>9}{'gradients':>11}")
    for documents in (1, 8):
        for seen in (s, window):
            starts = cuts(s, documents, b)
            place = np.arange(s)
            start = np.stack([row[np.searchsorted(row, place, side="right") - 1] for row in starts])
            lower = np.maximum(start, place - seen + 1).astype(np.int32)
            work = 4.0 * h * a * float((place - lower + 1).sum())  # FLOPs of the scores and values that are seen
            wide = both(partial(attend.attend, lower=jnp.asarray(lower), block=blocks[0]))
            with jax.default_matmul_precision("highest"):
                expected = wide(*(x.astype(jnp.float32) for x in (g, q, k, v)))
            case = f"{documents} document{'s' * (documents > 1)}, {'window' if seen < s else 'global'}"
            paths = {f"ours, block {one}": partial(attend.attend, lower=jnp.asarray(lower), block=one) for one in blocks}
            paths |= {
                "cuDNN, public": partial(cudnn, documents=documents, window=seen),
                "cuDNN, packed documents": partial(cudnn_packed, starts=starts, window=seen),
                "Pallas Triton": partial(pallas, starts=start, window=seen),
            }
            for name, path in paths.items():
                try:
                    forward, with_gradient = jax.jit(path), both(path)
                    one, two = (
                        seconds(partial(forward, q, k, v), args.least),
                        seconds(partial(with_gradient, g, q, k, v), args.least),
                    )
                    y, gradients = with_gradient(g, q, k, v)
                    figures = f"{1e3 * one:>11.2f}{1e3 * two:>11.2f}{3.5 * work / two / 1e12:>9.1f}"
                    print(f"  {case:<24}{name:<34}{figures}{apart(y, expected[0]):>9.1e}{apart(gradients, expected[1]):>11.1e}")
                except Exception as error:
                    print(f"  {case:<24}{name:<34}not compared: {reason(error)}")


def cuts(s: int, documents: int, b: int) -> np.ndarray:
    """Where the documents of each sequence start, [B, documents]; lengths are uneven."""
    rng = np.random.default_rng(0)
    inner = [np.sort(rng.choice(np.arange(1, s), documents - 1, replace=False)) for _ in range(b)]
    return np.stack([np.concatenate([[0], row]) for row in inner]).astype(np.int32)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, documents: int, window: int) -> jax.Array:
    if documents > 1:
        raise NotImplementedError("the public function takes no documents without a mask of S x S")
    size = None if window == q.shape[1] else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=size, implementation="cudnn")


def cudnn_packed(q: jax.Array, k: jax.Array, v: jax.Array, *, starts: np.ndarray, window: int) -> jax.Array:
    """The function below the public one takes the documents' lengths and offsets."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    b, s = q.shape[:2]
    offsets = np.concatenate([starts, np.full((b, 1), s)], 1).astype(np.int32)
    lengths = jnp.asarray(np.diff(offsets, axis=1))
    return fused.dot_product_attention(
        q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=jnp.asarray(offsets), kv_offsets=jnp.asarray(offsets),
        scale=q.shape[-1] ** -0.5, mask_type=fused.MaskType.PADDING_CAUSAL,
        sliding_window_length=None if window == s else window,
    )  # fmt: skip


def pallas(q: jax.Array, k: jax.Array, v: jax.Array, *, starts: np.ndarray, window: int) -> jax.Array:
    """Documents as segment ids; every query head needs a key/value head of its own. On a CPU it is interpreted."""
    from jax.experimental.pallas.ops.gpu import attention as kernels

    if window < q.shape[1]:
        raise NotImplementedError("the kernel has no window")
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(t, group, axis=2) for t in (k, v))
    out = kernels.mha(
        q, k, v, segment_ids=jnp.asarray(starts), sm_scale=q.shape[-1] ** -0.5, causal=True,
        interpret=jax.default_backend() == "cpu",
    )  # fmt: skip
    return out


# ---- the routed part of a sparse layer, by any transport -------------------------------------------


def carried(run: spec.Run, carry: Callable, everything: bool = False) -> tuple[Callable, Callable]:
    """(p, x, weights, experts) -> y over the run's mesh, and what puts such arguments there."""
    over, rows = P(None if everything else "expert", None, None), P(mesh.BATCH, None)
    axes = spec.AXES if everything else ("replica", "data", "context")

    def shard(p: Routed, x: jax.Array, weights: jax.Array, experts: jax.Array) -> tuple[jax.Array, Any]:
        p = jax.tree.map(lambda w: jax.lax.pcast(w, axes, to="varying"), p)
        x, weights, experts = (jax.lax.pcast(t, ("context",), to="varying") for t in (x, weights, experts))
        valid = experts[:, 0] >= 0
        y, book = carry(p, x, experts, weights, valid, run.routing, "bounded")
        dropped = book.sender_dropped + book.receiver_dropped
        return jax.lax.psum(y, "context"), jax.lax.psum(dropped, spec.AXES)

    spec_p = Routed(over, over, over)
    program = jax.shard_map(shard, in_specs=(spec_p, rows, rows, rows), out_specs=(rows, P()))

    def place(*args: Any) -> Any:
        at = jax.tree.map(lambda where: NamedSharding(mesh.make(run), where), (spec_p, rows, rows, rows), is_leaf=is_spec)
        return jax.device_put(args, at)

    return program, place


def is_spec(x: Any) -> bool:
    return isinstance(x, P)


def gradients(program: Callable) -> Callable:
    """y, dropped, and the gradients to experts, tokens and weights."""

    def run(p: Routed, x: jax.Array, weights: jax.Array, experts: jax.Array, g: jax.Array) -> Any:
        def loss(p: Routed, x: jax.Array, weights: jax.Array) -> Any:
            y, dropped = program(p, x, weights, experts)
            return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), (y, dropped)

        (_, (y, dropped)), found = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(p, x, weights)
        return y, dropped, found

    return jax.jit(run)


def problem(run: spec.Run, tokens: int, dtype: Any) -> tuple[Any, ...]:
    """Random experts, tokens and cotangent; routing by random logits, so that loads are those of chance."""
    moe, z = run.moe, spec.expert_width(run.moe, run.model)
    shapes = ((moe.experts, z, moe.hidden), (moe.experts, z, moe.hidden), (moe.experts, moe.hidden, z))
    p = Routed(*(normal(i, *shape, dtype=dtype) * dtype(z**-0.5) for i, shape in enumerate(shapes)))
    routed = router.route(normal(4, tokens, moe.experts), jnp.zeros(moe.experts), moe.experts_per_token, moe.combine_sum)
    return p, normal(5, tokens, z, dtype=dtype), routed.weights, routed.experts, normal(6, tokens, z, dtype=dtype)


def correctness(args: argparse.Namespace) -> None:
    ranks = devices()
    size = [f"mesh.expert={ranks}", f"data.batch_seqs={8 * ranks}", f"evals.batch_seqs={8 * ranks}", "routing.exchange=ragged",
            f"moe.experts={8 * ranks}", "routing.waves=2", f"routing.receiver_capacity={2 * ranks}"]  # fmt: skip
    run = spec.override(pocket.run(), size)
    p, x, weights, experts, g = problem(run, 64 * ranks, jnp.float32)
    print(f"\nragged against dense: {ranks} ranks of 8 experts in two chunks, {64 * ranks} tokens, float32; nothing dropped")
    with jax.set_mesh(mesh.make(run)), jax.default_matmul_precision("highest"):
        program, place = carried(run, dense.dense, everything=True)
        expected = jax.device_get(gradients(program)(*place(p, x, weights, experts), g))
        for by in WAYS:
            name = f"{by.move}, {by.products}"
            try:
                program, place = carried(run, partial(ragged.ragged, by=by))
                y, dropped, found = jax.device_get(gradients(program)(*place(p, x, weights, experts), g))
                verdict = "equal" if max(apart(y, expected[0]), apart(found, expected[2])) < 1e-5 else "DIFFERENT"
                print(f"  {name:<34}y {apart(y, expected[0]):.1e}   gradients {apart(found, expected[2]):.1e}"
                      f"   dropped {int(dropped)}   {verdict}")  # fmt: skip
            except Exception as error:
                print(f"  {name:<34}not compared: {reason(error)}")


# ---- rates -----------------------------------------------------------------------------------------


def product_rate(args: argparse.Namespace) -> float:
    """FLOP/s of one bfloat16 product of large square matrices."""
    n = 256 if args.tiny else 8192
    a, b = normal(0, n, n, dtype=jnp.bfloat16), normal(1, n, n, dtype=jnp.bfloat16)
    best = 2.0 * n**3 / seconds(partial(jax.jit(jnp.matmul), a, b), args.least)
    chip = rated()
    peak = "no rated figure for this chip" if chip is None else f"{best / chip.bf16_flops_per_s:.0%} of the rated {chip.label}"
    print(f"  one product of {n} x {n}: {best / 1e12:,.1f} TFLOP/s ({peak})")
    return best


def chunk(args: argparse.Namespace) -> None:
    count, z, f, rows = (3, 32, 32, 256) if args.tiny else (3, 3072, 3072, 301_466)
    p = Routed(
        *(
            normal(i, count, *shape, dtype=jnp.bfloat16) * jnp.bfloat16(z**-0.5)
            for i, shape in enumerate(((z, f), (z, f), (f, z)))
        )
    )
    x, g = normal(5, rows, z, dtype=jnp.bfloat16), normal(6, rows, z, dtype=jnp.bfloat16)
    print(f"\nproducts of a chunk: {count} experts of {z} x {f}, {rows:,} rows, bfloat16")
    best = product_rate(args)
    print(
        f"  {'form':<14}{'loads over the mean':<24}{'forward ms':>11}{'+ backward':>11}{'TFLOP/s':>9}{'of product':>11}{'y':>9}"
    )
    for shares in ((1.0, 1.0, 1.0), (1.5, 0.9, 0.6), (3.0, 0.0, 0.0)):
        mean = int(rows / count / 1.15)
        load = jnp.asarray([min(int(share * mean), rows) for share in shares], jnp.int32)
        done: dict[str, Any] = {}
        for form in ("padded", "ragged_dot"):
            path = partial(ragged.products, load=load, form=form)
            label = f"  {form:<14}{', '.join(map(str, shares)):<24}"
            try:
                step = both(path)
                one, two = seconds(partial(jax.jit(path), p, x), args.least), seconds(partial(step, g, p, x), args.least)
                done[form] = step(g, p, x)[0]
                rate = 18.0 * z * f * int(load.sum()) / two
                print(f"{label}{1e3 * one:>11.2f}{1e3 * two:>11.2f}{rate / 1e12:>9.1f}{rate / best:>11.1%}"
                      f"{apart(done[form], done.get('padded', done[form])):>9.1e}")  # fmt: skip
            except Exception as error:
                print(f"{label}not measured: {reason(error)}")


def rates(args: argparse.Namespace) -> None:
    ranks, chip, dtype = devices(), rated(), jnp.bfloat16
    base = pocket.run() if args.tiny else marin_535b.rung(2048)
    tokens = (64 if args.tiny else args.tokens) * ranks
    size = [
        f"mesh.expert={ranks}",
        "mesh.replica=1",
        f"evals.batch_seqs={ranks}",
        f"data.batch_seqs={8 * ranks}",
        "routing.waves=2",
    ]
    run = spec.override(base, [*size, "routing.exchange=ragged"])
    z, moe, k = spec.expert_width(run.moe, run.model), run.moe, run.moe.experts_per_token
    print(f"\nexperts: {moe.experts} of {z} x {moe.hidden}, top-{k}, {tokens:,} tokens on {ranks} devices, bfloat16")
    best = product_rate(args)
    work = 18.0 * z * moe.hidden * k * tokens / ranks  # FLOPs of one device's tokens, forward and backward
    few = moe.experts // ranks // run.routing.waves <= 8  # beyond, ragged_dot written out needs more memory than there is
    ways = [by for by in WAYS if by.products == "padded" or few]
    paths = {f"ragged: {by.move}, {by.products}": partial(ragged.ragged, by=by) for by in ways}
    paths |= {"pooled_wave": pooled_wave.pooled_wave} | ({"local: the capacity path": local.local} if ranks == 1 else {})
    print(f"  {'path':<36}{'forward ms':>11}{'+ backward':>11}{'tokens/s':>12}{'MFU':>8}{'of product':>11}{'dropped':>9}")
    with jax.set_mesh(mesh.make(run)):
        p, x, weights, experts, g = problem(run, tokens, dtype)

        def row(name: str, one: float, two: float, dropped: float) -> None:
            rate = work * (1 - dropped) / two
            mfu = "-" if chip is None else f"{rate / chip.bf16_flops_per_s:.1%}"
            print(
                f"  {name:<36}{1e3 * one:>11.2f}{1e3 * two:>11.2f}{tokens / two:>12,.0f}{mfu:>8}{rate / best:>11.1%}{dropped:>9.2%}"
            )

        for name, carry in paths.items():
            try:
                program, place = carried(run, carry)
                there = place(p, x, weights, experts)
                step = gradients(program)
                one, two = seconds(partial(jax.jit(program), *there), args.least), seconds(partial(step, *there, g), args.least)
                row(name, one, two, int(step(*there, g)[1]) / (tokens * k))
            except Exception as error:
                print(f"  {name:<36}not measured: {reason(error)}")
        if ranks == 1:
            full = layout.capacity_rows(tokens * k, moe.experts, run.routing.receiver_capacity)
            rows, back = normal(7, moe.experts, full, z, dtype=dtype), normal(8, moe.experts, full, z, dtype=dtype)
            one, two = (
                seconds(partial(f, *a), args.least) for f, a in ((jax.jit(swiglu), (p, rows)), (both(swiglu), (back, p, rows)))
            )
            row("the padded products alone", one, two, 0.0)


def rated() -> hardware.Chip | None:
    """The planner's figures for the chip that is here."""
    kind = jax.devices()[0].device_kind.lower()
    return next((chip for name, chip in hardware.CHIPS.items() if name != "cpu" and name in kind), None)


def devices() -> int:
    """As many devices as a mesh of experts can use."""
    return max(n for n in (1, 2, 4, 8) if n <= jax.device_count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"attention": attention, "ragged": correctness, "chunk": chunk, "experts": rates}
    parser.add_argument("--only", choices=parts, help="one table alone")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens of a device in the last table")
    parser.add_argument("--least", type=float, default=0.5, help="seconds that each figure is measured for")
    parser.add_argument("--tiny", action="store_true", help="small shapes: to see that the script runs")
    args = parser.parse_args()
    args.least = 0.0 if args.tiny else args.least
    first = jax.devices()[0]
    print(
        f"{jax.device_count()} x {first.device_kind} ({jax.default_backend()}), jax {jax.__version__}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}"
    )
    if jax.default_backend() == "cpu":
        print("no accelerator is here: its kernels and the ragged all-to-all cannot be compared; times say nothing")
        if not args.tiny:
            parser.error("without an accelerator only --tiny makes sense")
    for name, part in parts.items():
        if args.only in (None, name):
            part(args)


if __name__ == "__main__":
    main()
