"""Tokens per second of a whole training step: Argosy beside Hugging Face's Qwen3-MoE, in one run.

    python bench/step.py --peer-python /path/to/python    # one that has torch and transformers

Both sides train the same shape from the same tokens in float32 with the same number of threads, each in a process
of its own. All are warmed up first; then they take turns, a few steps each, round after round, so that slow
changes of the machine fall on all of them; ratios are taken within a round. Use an idle machine: torch waits for the
slowest of its threads, so another busy process costs the peer several times what it costs XLA. The peer's candidates
(each experts implementation of transformers that has a CPU path, and `torch.compile`) are tried before, and the fastest
is measured.

Printed per row: the median tokens per second over the blocks with the lowest and the highest, the ratio to the
peer, the highest resident memory of the process (and what the imports alone take), total and active parameters,
FLOPs per token (6 per active matrix parameter and the causal half of attention; padding, recomputation and
the optimizer do not count), and the FLOPs' share of the sgemm peak that JAX reached on the same threads in the same run.
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

SHAPE = {
    "layers": 4, "width": 256, "heads": 4, "kv_heads": 2, "head_width": 64, "experts": 64, "experts_per_token": 8,
    "hidden": 128, "vocab": 8192, "seq_len": 256, "batch_seqs": 8,
}  # fmt: skip
TOKENS = SHAPE["seq_len"] * SHAPE["batch_seqs"]
RATE = 1e-3  # AdamW's learning rate on both sides
DECAY = 0.1
WARM_UP = 3
PEERS = ("eager", "grouped_mm", "batched_mm", "grouped_mm+compile")

COMMON = [
    f"model.vocab={SHAPE['vocab']}", f"model.width={SHAPE['width']}", f"model.layers={SHAPE['layers']}",
    f"model.heads={SHAPE['heads']}", f"model.head_width={SHAPE['head_width']}", f"model.kv_heads_local={SHAPE['kv_heads']}",
    f"model.window={SHAPE['seq_len']}", f"moe.experts={SHAPE['experts']}",
    f"moe.experts_per_token={SHAPE['experts_per_token']}", f"moe.hidden={SHAPE['hidden']}",
    f"data.seq_len={SHAPE['seq_len']}", f"data.batch_seqs={SHAPE['batch_seqs']}",
    f"evals.batch_seqs={SHAPE['batch_seqs']}", "optim.horizon_tokens=2_048_000",
    "optim.warmup_frac=0", "optim.final_frac=1.0",
    f"optim.adamw_lr={RATE}", f"optim.weight_decay={DECAY}",
]  # fmt: skip
SAME = [*COMMON, f"model.kv_heads_global={SHAPE['kv_heads']}", "model.position=rope_all", "model.attention=plain",
    "model.head_gate=none", "model.convolution=none", "model.z_loss=none", "moe.latent=none",
]  # fmt: skip
WHOLE = [*COMMON, "model.kv_heads_global=1", f"model.window={SHAPE['seq_len'] // 2}", f"moe.latent_width={SHAPE['width'] // 2}",
    f"moe.shared_hidden={SHAPE['hidden']}",
]  # fmt: skip
ROWS = {
    "argosy, AdamW": [*SAME, "optim.rule=adamw"],
    "argosy, MuonH": [*SAME, "optim.rule=hyperball"],
    "argosy whole, MuonH": [*WHOLE, "optim.rule=hyperball"],
}


# ---- what both sides do ------------------------------------------------------------------------


def tokens(step: int) -> Any:
    """The batch of a step, [B, S + 1] int64: words drawn by Zipf's law, each often followed by its successor."""
    import numpy as np

    rng = np.random.default_rng(step)
    shape = (SHAPE["batch_seqs"], SHAPE["seq_len"] + 1)
    odds = 1 / np.arange(10, SHAPE["vocab"] + 10)
    drawn = rng.choice(SHAPE["vocab"], shape, p=odds / odds.sum())
    follows = rng.random(shape) < 0.5
    for t in range(1, shape[1]):
        drawn[:, t] = np.where(follows[:, t], (drawn[:, t - 1] + 1) % SHAPE["vocab"], drawn[:, t])
    return drawn


def flops_per_token(active: float) -> float:
    """Forward and backward: 6 per active matrix parameter, 12 per (query, visible key) and head dim."""
    attention = 12 * SHAPE["layers"] * SHAPE["heads"] * SHAPE["head_width"] * (SHAPE["seq_len"] + 1) / 2
    return 6 * active + attention


def best_s(call: Callable[[], Any], times: int = 8) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def heap() -> Any:
    """The module `argosy.heap`, for both sides alike: from its file, as the peer's Python has no argosy."""
    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "src", "argosy", "heap.py")
    found = importlib.util.spec_from_file_location("heap", file)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def argosy(settings: list[str], threads: int) -> tuple[dict[str, Any], Callable[[int], float], Callable[[], float]]:
    """What the row is, `step(n) -> loss`, and `sgemm() -> FLOP/s`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from argosy import leaf, mesh, spec
    from argosy.data.loader import Batch
    from argosy.model import transformer
    from argosy.runs import pocket
    from argosy.train import step as steps

    imports = peak_mib()
    run = spec.override(pocket.run(), settings)
    if run.moe.latent == "none":  # the peer has no shared experts
        run = spec.override(run, ["moe.shared_experts=0"])
    total, active = 0, 0.0
    for name, one in leaf.flatten(transformer.leaves(run)).items():
        total += one.size
        if one.kind in ("matrix", "readout", "gate") and "embed" not in name:
            active += one.size * (run.moe.experts_per_token / run.moe.experts if one.part == "routed" else 1)
    place = mesh.make(run)
    jax.set_mesh(place)
    train_step = steps.compiled(run).lower(steps.abstract(run, place), steps.abstract_batch(run, place)).compile()
    heap().trim()  # as the training loop does
    state = steps.init(run, place)
    start = np.zeros((SHAPE["batch_seqs"], SHAPE["seq_len"]), np.int32)
    b_s = jax.sharding.NamedSharding(place, mesh.B_S)

    def step(n: int) -> float:
        nonlocal state
        words = tokens(n).astype(np.int32)
        batch = Batch(*(jax.device_put(x, b_s) for x in (words[:, :-1], words[:, 1:], start, start == 0)))
        state, stats = train_step(state, batch)
        return float(stats.loss)

    a = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(jnp.matmul)

    def sgemm() -> float:
        return 2 * 2048**3 / best_s(lambda: product(a, a).block_until_ready())

    what = {"total": total, "active": active, "imports": imports, "versions": f"jax {jax.__version__}"}
    return what, step, sgemm


def peer(variant: str, threads: int) -> tuple[dict[str, Any], Callable[[int], float], Callable[[], float]]:
    """The same for Qwen3-MoE, with one experts implementation, compiled or not."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    imports = peak_mib()
    experts, _, compiled = variant.partition("+")
    config = transformers.Qwen3MoeConfig(
        vocab_size=SHAPE["vocab"], hidden_size=SHAPE["width"], intermediate_size=SHAPE["hidden"],
        num_hidden_layers=SHAPE["layers"], num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"],
        head_dim=SHAPE["head_width"], moe_intermediate_size=SHAPE["hidden"], num_experts=SHAPE["experts"],
        num_experts_per_tok=SHAPE["experts_per_token"], norm_topk_prob=True, max_position_embeddings=SHAPE["seq_len"],
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM._from_config(config, experts_implementation=experts).train()
    assert model.config._experts_implementation == experts
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY, fused=True)
    total, active = 0, 0.0
    for name, one in model.named_parameters():
        total += one.numel()
        if one.ndim > 1 and "embed" not in name:
            active += one.numel() * (SHAPE["experts_per_token"] / SHAPE["experts"] if one.ndim == 3 else 1)
    forward = torch.compile(model) if compiled else model

    def step(n: int) -> float:
        words = torch.from_numpy(tokens(n))
        inputs, labels = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        loss = forward(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    a = torch.ones(2048, 2048)

    def sgemm() -> float:
        return 2 * 2048**3 / best_s(lambda: a @ a)

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, attention {config._attn_implementation}"
    return {"total": total, "active": active, "imports": imports, "versions": versions}, step, sgemm


# ---- one side's process ------------------------------------------------------------------------


def work(side: str, what: str, threads: int, memory_gib: float) -> None:
    """Answer each line of standard input with a line of JSON: a number of steps to time, or `end`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_gib * 2**30),) * 2)
    heap().keep()
    made, step, sgemm = argosy(json.loads(what), threads) if side == "argosy" else peer(what, threads)
    first, *_ = [step(n) for n in range(WARM_UP)]
    done, loss = WARM_UP, first

    def answer(body: dict[str, Any]) -> None:
        print(json.dumps(body), file=answers, flush=True)

    answer(made | {"first_loss": first})
    for line in sys.stdin:
        if line.strip() == "end":
            break
        count = int(line)
        start = time.perf_counter()
        for _ in range(count):
            loss = step(done)
            done += 1
        answer({"tokens_per_s": count * TOKENS / (time.perf_counter() - start), "loss": loss, "steps": done})
    answer({"peak_mib": peak_mib(), "sgemm": sgemm()})


class Side:
    """A side's process, from its start to its last answer."""

    def __init__(self, python: str, side: str, what: str, args: argparse.Namespace):
        cpus = sorted(os.sched_getaffinity(0))[: args.threads]
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"), str(args.threads))
        command = [
            python,
            __file__,
            "--worker",
            side,
            what,
            "--threads",
            str(args.threads),
            "--memory-gib",
            str(args.memory_gib),
        ]
        self.errors = open(os.path.join(args.scratch, f"step_{side}_{os.getpid()}.log"), "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )  # fmt: skip
        self.blocks: list[float] = []
        self.made = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            last = [text for text in self.errors.read().splitlines() if text.strip()][-1:]
            raise RuntimeError(f"exit status {code}: {last[0][:160] if last else 'no message'}")
        return json.loads(line)

    def say(self, text: str) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.read()

    def block(self, steps: int) -> float:
        self.last = self.say(str(steps))
        self.blocks.append(self.last["tokens_per_s"])
        return self.blocks[-1]

    def end(self) -> dict[str, Any]:
        self.ended = self.say("end")
        self.process.wait()
        return self.ended


# ---- the comparison ----------------------------------------------------------------------------


def has_torch(python: str) -> bool:
    probe = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('transformers')))"
    return subprocess.run([python, "-c", probe], check=False).returncode == 0


def fastest_peer(python: str, args: argparse.Namespace) -> str | None:
    """Try the peer's candidates one after another; the name of the fastest."""
    rates: dict[str, float] = {}
    for variant in args.peers.split(","):
        try:
            side = Side(python, "peer", variant, args)
            rates[variant] = max(side.block(args.steps), side.block(args.steps))
            print(f"  peer {variant:<20} {rates[variant]:>8,.0f} tokens/s   {side.end()['peak_mib']:>7,.0f} MiB", flush=True)
        except RuntimeError as error:
            print(f"  peer {variant:<20} does not run here: {error}", flush=True)
    return max(rates, key=rates.get) if rates else None  # type: ignore[arg-type]


def table(sides: dict[str, Side], reference: str | None, sgemm: float) -> list[dict[str, Any]]:
    rows = []
    for name, side in sides.items():
        rate = statistics.median(side.blocks)
        per_token = flops_per_token(side.made["active"])
        ratios = [a / b for a, b in zip(side.blocks, sides[reference].blocks, strict=True)] if reference else []
        rows.append({
            "row": name, "tokens_per_s": rate, "lowest": min(side.blocks), "highest": max(side.blocks),
            "ratio": statistics.median(ratios) if ratios else None, "peak_mib": side.ended["peak_mib"],
            "imports_mib": side.made["imports"], "total": side.made["total"], "active": side.made["active"],
            "flops_per_token": per_token, "peak_share": rate * per_token / sgemm,
            "first_loss": side.made["first_loss"], "last_loss": side.last["loss"], "steps": side.last["steps"],
            "versions": side.made["versions"],
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'':<28}{'tokens/s':>9} {'(lowest - highest)':>20}{'ratio':>7}{'peak MiB':>10}{'(imports)':>10}"
          f"{'total M':>9}{'active M':>9}{'MFLOP/tok':>10}{'of sgemm':>9}   loss")  # fmt: skip
    for r in rows:
        spread = f"({r['lowest']:,.0f} - {r['highest']:,.0f})"
        ratio = f"{r['ratio']:.2f}" if r["ratio"] else "-"
        print(
            f"{r['row']:<28}{r['tokens_per_s']:>9,.0f} {spread:>20}{ratio:>7}{r['peak_mib']:>10,.0f}{r['imports_mib']:>10,.0f}"
            f"{r['total'] / 1e6:>9.2f}{r['active'] / 1e6:>9.3f}{r['flops_per_token'] / 1e6:>10.2f}{r['peak_share']:>9.1%}"
            f"   {r['first_loss']:.2f} -> {r['last_loss']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--peers", default=",".join(PEERS), help="the peer's candidates; empty: no peer")
    parser.add_argument("--rows", default=";".join(ROWS), help="Argosy's rows, divided by ;")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory-gib", type=float, default=16.0, help="limit of each process's memory")
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="folder for the processes' messages")
    parser.add_argument("--json", default="", help="write the rows to this file, too")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "WHAT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(*args.worker, args.threads, args.memory_gib)

    print(
        f"shape: {', '.join(f'{k} {v:,}' for k, v in SHAPE.items())}; {TOKENS:,} tokens per step, float32, {args.threads} threads"
    )
    best = None
    if args.peers and not has_torch(args.peer_python):
        print(f"{args.peer_python} has no torch and transformers: no peer is measured; pip install 'argosy[bench]'"
              " there, or name another with --peer-python")  # fmt: skip
    elif args.peers:
        best = fastest_peer(args.peer_python, args)
    sides = {f"Qwen3-MoE, {best}": Side(args.peer_python, "peer", best, args)} if best else {}
    reference = next(iter(sides), None)
    if importlib.util.find_spec("argosy") is None:
        parser.error(f"{sys.executable} has no argosy; run this file with the Python that has")
    for row in filter(None, args.rows.split(";")):
        sides[row] = Side(sys.executable, "argosy", json.dumps(ROWS[row]), args)
    for _ in range(args.rounds):
        for side in sides.values():
            side.block(args.steps)
    ends = {name: side.end() for name, side in sides.items()}
    sgemm = max((end["sgemm"] for name, end in ends.items() if name != reference), default=float("nan"))
    rows = table(sides, reference, sgemm)
    show(rows)
    print(
        f"\nsgemm 2,048: JAX {sgemm / 1e9:,.0f} GFLOP/s"
        + (f", torch {ends[reference]['sgemm'] / 1e9:,.0f}" if reference else "")
    )
    kept = "freed memory stays in every process's heap (mallopt)" if heap().keep() else "the heap as the system sets it"
    print(
        f"blocks of {args.steps} steps, {args.rounds} rounds; {kept}; {'; '.join(dict.fromkeys(r['versions'] for r in rows))}"
    )
    if args.json:
        with open(args.json, "w") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
