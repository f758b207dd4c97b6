"""Tokens per second of one sparse layer by transport, beside a dense MLP and Hugging Face's Qwen3-MoE block, in one run.

    python bench/exchange.py --peer-python /path/to/python    # one that has torch and transformers

The layer is that of `bench/step.py` (shape printed), float32, routed experts alone: router, top-k, balance and statistics,
transport, experts. The router's bias is first balanced on the same tokens, as training would. Each transport runs on as
many CPU devices as asked for, `bounded` (a row says what it dropped) and `dropless` (nothing), beside

    mlp     a dense SwiGLU whose hidden width is experts per token x expert width: the same active FLOPs, in JAX
    peer    Qwen3MoeSparseMoeBlock with each experts implementation that runs here; drops nothing

One process per side and number of devices, each limited to the same processors; after a warm-up the rows take turns, round
after round. Printed: the median of tokens per second over the rounds with the lowest and the highest, forward and forward
with backward; the ratios of medians of the latter; the share of that time which is not the experts' nine products, themselves
timed in the same rounds on buffers of the same capacity (one device); dropped of valid assignments. Use an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import step  # beside this file: the shape, and how a peer is found

SHAPE = step.SHAPE
LAYER = [*step.SAME, "optim.rule=adamw", "moe.shared_experts=0", "model.layers=1"]
PRODUCTS = "products alone"
Row = tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]  # forward, with backward, what to say of it


def transports(devices: int) -> dict[str, list[str]]:
    """Names of rows and their settings: the transports that this version has, where they make sense."""
    from argosy.model import exchange

    found = {}
    for name in exchange._TRANSPORTS:
        if name == "dense" or (name == "ragged" and devices == 1):
            continue
        place = f"mesh.replica={devices}" if name == "local" else f"mesh.expert={devices}"
        for capacity in ("bounded", "dropless"):
            found[f"{name}, {capacity}"] = [f"routing.exchange={name}", f"routing.capacity={capacity}", place]
    return found


def layers(devices: int) -> dict[str, Row]:
    """Argosy's rows and the MLP, compiled."""
    import jax
    import numpy as np

    found: dict[str, Row] = {}
    rng = np.random.default_rng(0)
    shape = (SHAPE["batch_seqs"], SHAPE["seq_len"], SHAPE["width"])
    x, g = (rng.standard_normal(shape, np.float32) for _ in range(2))
    for name, settings in transports(devices).items():
        try:
            found[name] = sparse(settings, x, g)
        except ValueError as error:
            print(f"  {name} on {devices}: {error}", file=sys.stderr)
    found["mlp"] = dense(devices, x, g)
    if devices == 1:
        found[PRODUCTS] = products()
    jax.block_until_ready([call() for row in found.values() for call in row[:2]])
    return found


def sparse(settings: list[str], x: Any, g: Any) -> Row:
    """One transport's layer."""
    import jax
    import jax.numpy as jnp

    from argosy import leaf, mesh, spec
    from argosy.model import exchange
    from argosy.runs import pocket

    run = spec.override(pocket.run(), [*LAYER, *settings])
    place = mesh.make(run)
    with jax.set_mesh(place):
        p = leaf.init(exchange.leaves(run), place, 0)
        x, g = (jax.device_put(a, jax.NamedSharding(place, mesh.B_S_D)) for a in (x, g))
        valid = jax.device_put(jnp.ones(x.shape[:2], bool), jax.NamedSharding(place, mesh.B_S))
        bias = jnp.zeros((run.moe.experts,), jnp.float32)

        def layer(p: Any, x: Any, bias: Any) -> Any:
            y, stats = exchange.moe(p, x, bias, valid, run)
            return jnp.sum(y * g), (y, stats)

        def both(p: Any, x: Any, bias: Any) -> Any:
            (_, (y, _)), grads = jax.value_and_grad(layer, argnums=(0, 1), has_aux=True)(p, x, bias)
            return y, grads

        forward = jax.jit(lambda *a: layer(*a)[1]).lower(p, x, bias).compile()
        backward = jax.jit(both).lower(p, x, bias).compile()
        for _ in range(4):
            _, stats = forward(p, x, bias)
            bias = stats.next_bias
        ledger = jax.device_get(forward(p, x, bias)[1].ledger)
    dropped = float(ledger.sender_dropped + ledger.receiver_dropped) / float(ledger.valid)
    wait = jax.block_until_ready
    return lambda: wait(forward(p, x, bias)[0]), lambda: wait(backward(p, x, bias)), {"dropped": dropped}


def dense(devices: int, x: Any, g: Any) -> Row:
    """The MLP, its batch divided over the devices, in the form that is fastest here (`linear`)."""
    import jax
    import jax.numpy as jnp

    from argosy import mesh, spec
    from argosy.model.linear import linear
    from argosy.runs import pocket

    run = spec.override(pocket.run(), [*LAYER, f"mesh.replica={devices}"])
    hidden = SHAPE["experts_per_token"] * SHAPE["hidden"]
    place = mesh.make(run)
    with jax.set_mesh(place):
        whole = jax.NamedSharding(place, jax.P(None, None))
        shapes = [(SHAPE["width"], hidden), (SHAPE["width"], hidden), (hidden, SHAPE["width"])]
        p = [jax.device_put(jax.random.normal(jax.random.key(i), s) / 16, whole) for i, s in enumerate(shapes)]
        x, g = (jax.device_put(a, jax.NamedSharding(place, mesh.B_S_D)) for a in (x, g))

        def layer(p: Any, x: Any) -> Any:
            y = linear(jax.nn.silu(linear(x, p[0])) * linear(x, p[1]), p[2])
            return jnp.sum(y * g), y

        forward = jax.jit(lambda *a: layer(*a)[1]).lower(p, x).compile()
        backward = jax.jit(jax.value_and_grad(layer, argnums=(0, 1), has_aux=True)).lower(p, x).compile()
    wait = jax.block_until_ready
    return lambda: wait(forward(p, x)), lambda: wait(backward(p, x)), {}


def products() -> Row:
    """The products of the experts and nothing else: three forward, six backward, on full buffers of the layer's capacity."""
    import jax
    import jax.numpy as jnp

    from argosy import spec
    from argosy.model.exchange import layout
    from argosy.runs import pocket

    run = spec.override(pocket.run(), LAYER)
    e, z, f = SHAPE["experts"], SHAPE["width"], SHAPE["hidden"]
    c = layout.capacity_rows(step.TOKENS * SHAPE["experts_per_token"], e, run.routing.receiver_capacity)
    shapes = [(e, c, z), (e, c, z), (e, z, f), (e, z, f), (e, f, z)]
    made = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    dot = jnp.einsum

    def three(rows: Any, dy: Any, gate: Any, up: Any, down: Any) -> Any:
        g, u = dot("ecz,ezf->ecf", rows, gate), dot("ecz,ezf->ecf", rows, up)
        return g, u, dot("ecf,efz->ecz", g, down)

    def nine(rows: Any, dy: Any, gate: Any, up: Any, down: Any) -> Any:
        g, u, y = three(rows, dy, gate, up, down)
        dh, ddown = dot("ecz,efz->ecf", dy, down), dot("ecf,ecz->efz", g, dy)
        dgate, dup = dot("ecz,ecf->ezf", rows, dh), dot("ecz,ecf->ezf", rows, u)
        return y, ddown, dgate, dup, dot("ecf,ezf->ecz", dh, gate), dot("ecf,ezf->ecz", u, up)

    forward, backward = (jax.jit(one).lower(*made).compile() for one in (three, nine))
    wait = jax.block_until_ready
    return lambda: wait(forward(*made)), lambda: wait(backward(*made)), {"rows_per_expert": c}


def peer(threads: int) -> dict[str, Row]:
    """The peer's block with each implementation of its experts that runs here."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    found: dict[str, Row] = {}
    for experts in ("eager", "grouped_mm"):
        config = transformers.Qwen3MoeConfig(
            vocab_size=64, hidden_size=SHAPE["width"], intermediate_size=SHAPE["hidden"], num_hidden_layers=1,
            num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"], head_dim=SHAPE["head_width"],
            moe_intermediate_size=SHAPE["hidden"], num_experts=SHAPE["experts"],
            num_experts_per_tok=SHAPE["experts_per_token"], norm_topk_prob=True,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation=experts).train()
        block = model.model.layers[0].mlp
        x = torch.randn(SHAPE["batch_seqs"], SHAPE["seq_len"], SHAPE["width"], requires_grad=True)
        g = torch.randn_like(x)

        def run(block: Any = block, x: Any = x) -> Any:
            y = block(x)
            return y[0] if isinstance(y, tuple) else y

        def forward(run: Any = run) -> None:
            with torch.no_grad():
                run()

        def both(run: Any = run, block: Any = block, x: Any = x, g: Any = g) -> None:
            block.zero_grad(set_to_none=True)
            x.grad = None
            run().backward(g)

        both()
        found[f"peer, {experts}"] = (forward, both, {"dropped": 0.0})
    return found


# ---- processes and rounds ------------------------------------------------------------------------


def work(side: str, devices: int, threads: int) -> None:
    """Answer lines of standard input, `row forward|both times`, with the seconds that one call takes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    step.heap().keep()
    rows = layers(devices) if side == "argosy" else peer(threads)
    print(json.dumps({name: row[2] for name, row in rows.items()}), file=answers, flush=True)
    for line in sys.stdin:
        name, what, times = json.loads(line)
        call = rows[name][what == "both"]
        call()
        start = time.perf_counter()
        for _ in range(times):
            call()
        print((time.perf_counter() - start) / times, file=answers, flush=True)


class Side:
    """A side's process: its rows, and the time of one of them."""

    def __init__(self, python: str, side: str, devices: int, threads: int):
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"), str(threads))
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        command = [python, __file__, "--worker", side, str(devices), "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )  # fmt: skip
        self.rows: dict[str, dict[str, Any]] = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process {' '.join(self.process.args)} ended; its messages are above")  # type: ignore[arg-type]
        return line

    def seconds(self, row: str, what: str, times: int) -> float:
        assert self.process.stdin
        print(json.dumps([row, what, times]), file=self.process.stdin, flush=True)
        return float(self._line())


def show(rows: list[dict[str, Any]]) -> None:
    def rate(seconds: list[float]) -> str:
        rates = [step.TOKENS / s for s in seconds]
        return f"{statistics.median(rates):>9,.0f} ({min(rates):,.0f} - {max(rates):,.0f})"

    middle = {(r["devices"], r["row"]): statistics.median(r["both"]) for r in rows}
    peers = [s for (_, name), s in middle.items() if name.startswith("peer")]
    print(
        f"\n{'devices':<8}{'':<24}{'forward, tokens/s':<34}{'and backward':<34}{'of mlp':>8}{'of peer':>9}{'rest':>7}{'dropped':>9}"
    )
    for r in rows:
        here = middle[r["devices"], r["row"]]
        mlp, alone = middle.get((r["devices"], "mlp")), middle.get((r["devices"], PRODUCTS))
        of_mlp = f"{mlp / here:.0%}" if mlp and r["row"] != PRODUCTS else ""
        of_peer = f"{min(peers) / here:.2f}" if peers and r["row"] != PRODUCTS else ""
        rest = f"{1 - alone / here:.0%}" if alone and r["row"] == "local, bounded" else ""
        dropped = f"{r['dropped']:.1%}" if "dropped" in r else ""
        print(
            f"{r['devices']:<8}{r['row']:<24}{rate(r['forward']):<34}{rate(r['both']):<34}{of_mlp:>8}{of_peer:>9}{rest:>7}{dropped:>9}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--devices", default="1,8", help="numbers of CPU devices, divided by ,")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--times", type=int, default=4, help="calls in a block")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", default="", help="write the rows to this file, too")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "DEVICES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker[0], int(args.worker[1]), args.threads)

    sides = [(n, Side(sys.executable, "argosy", n, args.threads)) for n in map(int, args.devices.split(","))]
    if step.has_torch(args.peer_python):
        sides.append((1, Side(args.peer_python, "peer", 1, args.threads)))
    else:
        print(f"{args.peer_python} has no torch and transformers: no peer is measured; name another with --peer-python")
    rows = [
        {"devices": n, "row": name, "side": side, "forward": [], "both": []} | what
        for n, side in sides
        for name, what in side.rows.items()
    ]
    for _ in range(args.rounds):
        for row in rows:
            for what in ("forward", "both"):
                row[what].append(row["side"].seconds(row["row"], what, args.times))
    for row in rows:
        del row["side"]
    wanted = ("width", "experts", "experts_per_token", "hidden", "seq_len", "batch_seqs")
    print(
        f"shape: {', '.join(f'{k} {SHAPE[k]:,}' for k in wanted)}; {step.TOKENS:,} tokens, float32, {args.threads} threads;"
        f" blocks of {args.times} calls, {args.rounds} rounds"
    )
    show(rows)
    if args.json:
        with open(args.json, "w") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
