"""The rehearsal: a run's complete training step, traced, lowered and compiled for its real mesh on a CPU, and audited.

Nothing is allocated: state and batch are shapes with shardings. The step needs as many (pretended) devices as the run
has, and those must be asked for before JAX starts, so `rehearse` does the work in a process of its own; `audit` is that
work, for a process that has the devices.
"""

import json
import math
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from argosy import spec
from argosy.launch import local, minimum
from argosy.plan import hardware, memory, work

MOST_DEVICES = 8_192  # pretended at once: 704 took 2.5 GB
TOLERANCE = 0.02  # of a closed form
PLACES = ("device", "host")
KINDS = ("params", "masters", "optimizer", "batch")


def scaled(run: spec.Run, devices: int) -> spec.Run:
    """The run on another number of devices: more or fewer replicas, the same batch.

    The held-out batch, which changes no training step, is rounded up to the new number of shards.

    Raises:
        ValueError: if that many devices are not whole replicas, or the batch does not divide over them.
    """
    m = run.mesh
    inner, shards = m.data * m.context * m.expert, m.data * m.expert
    batch = run.data.batch_seqs // run.compute.accumulate
    legal = [inner * r for r in range(1, batch // shards + 1) if batch % (shards * r) == 0]
    if devices not in legal:
        near = sorted(sorted(legal, key=lambda n: abs(n - devices))[:3])
        raise ValueError(
            f"--devices {devices} is not a whole number of replicas of data {m.data} x context {m.context} x expert {m.expert}"
            f" = {inner} devices over which data.batch_seqs={run.data.batch_seqs:,} divides"
            f" (compute.accumulate={run.compute.accumulate}); nearest legal {', '.join(map(str, near)) or 'none'}"
        )
    replicas = devices // inner
    unit = shards * replicas
    held_out = -(-run.evals.batch_seqs // unit) * unit
    return replace(run, mesh=replace(m, replica=replicas), evals=replace(run.evals, batch_seqs=held_out))


def rehearse(run: spec.Run, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> dict:
    """The audit of a run's training step, made in a process of its own with as many CPU devices as the run has.

    `say` is given a line of progress at a time.

    Raises:
        ValueError: for a run that this version cannot train, before anything is compiled.
        ChildProcessError: if the process ends in another way, with the end of what it said.
    """
    hardware.chip(run.compute.chip)
    possible(run)
    say(f"starting {spec.devices(run):,} pretended devices")
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags += [f"--xla_force_host_platform_device_count={spec.devices(run)}", "--xla_backend_optimization_level=0"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    errors: list[str] = []

    def listen(lines: Iterable[str]) -> None:
        for line in lines:
            if line.startswith(_PROGRESS):
                say(line[len(_PROGRESS) :].rstrip())
            else:
                errors.append(line)

    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-m", "argosy.launch.rehearse"], text=True, env=env, **pipes) as child:
        assert child.stdin and child.stdout and child.stderr
        listener = threading.Thread(target=listen, args=(child.stderr,), daemon=True)
        listener.start()
        try:
            child.stdin.write(json.dumps(spec.to_json(run)))
            child.stdin.close()
            answer = child.stdout.read()
            status = child.wait()
            listener.join()
        finally:
            child.kill()
    if status:
        raise ChildProcessError(status, f"the rehearsal ended with status {status}: {' '.join(''.join(errors).split()[-60:])}")
    found = json.loads(answer)
    if "refused" in found:
        raise ValueError(found["refused"])
    return found


def possible(run: spec.Run) -> None:
    """Refuse what has no meaning on many pretended devices.

    Raises:
        ValueError: with the nearest run that can be rehearsed.
    """
    if spec.devices(run) > MOST_DEVICES:
        one = spec.devices(run) // run.mesh.replica
        fewer = f"--devices {MOST_DEVICES // one * one}" if one <= MOST_DEVICES else "a smaller mesh"
        raise ValueError(
            f"{spec.devices(run):,} devices are more than the {MOST_DEVICES:,} that can be pretended here; replicas are alike:"
            f" nearest {fewer}"
        )
    if run.routing.exchange == "dense" and run.mesh.expert > 1:
        raise ValueError(
            f"routing.exchange=dense is the oracle: with mesh.expert={run.mesh.expert} every device gathers all experts, which"
            " no plan counts; nearest --set routing.exchange=pooled_wave or ragged"
        )


_PROGRESS = "rehearse: "
_GATHERED = "model/exchange/gathered.py:"


def main() -> None:
    """The process that `rehearse` starts: a run as JSON on standard input, its audit on standard output."""
    from argosy.model import transformer
    from argosy.train import loop

    # Training writes few layers out one after the other; they are alike, and a loop of them takes a tenth of the time to compile.
    transformer.UNROLL_LAYERS = 0
    if sys.platform == "linux":
        local.end_with_parent()  # a rehearsal that nobody waits for any more ends
    run = spec.from_json(json.load(sys.stdin))
    try:
        loop.ready(run)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
        return
    found = audit(run, lambda text: print(f"{_PROGRESS}{text}", file=sys.stderr, flush=True))
    print(json.dumps(found, allow_nan=False))


# ---- the audit ------------------------------------------------------------------------------------


def audit(run: spec.Run, say: Callable[[str], None] = lambda text: None) -> dict:
    """What the training step of a run holds and moves, beside what it should; `problems` are sentences.

    Needs at least as many devices as the run has, and a run that `loop.ready` lets in.
    """
    import jax

    from argosy import mesh as meshes
    from argosy.launch import collectives, compiled

    started, sizes = time.monotonic(), dict(zip(spec.AXES, meshes.sizes(run), strict=True))
    mesh = meshes.make(run)
    problems = undivided(run)
    if problems:
        return _result(run, problems, {}, [], {}, started)
    with jax.set_mesh(mesh):
        say(f"tracing the training step of {run.recipe} for {spec.devices(run):,} devices")
        step, state, batch = program(run, mesh)
        held = {kind: _held(tree) for kind, tree in kinds(state, batch).items()}
        problems += bytes_problems(run, held) + replicated(run, state)
        trace = step.trace(state, batch)
        found = collectives.traced(trace.jaxpr.jaxpr, sizes)
        # a CPU's program is a stand-in there
        ragged = run.routing.exchange == "ragged" and run.mesh.expert > 1 and not work.gathered(run)
        groups, unexplained = explain(run, _on_an_accelerator(run, sizes) if ragged else found)
        problems += unexplained + against_minimum(run, groups)
        say(f"lowering; {len(found):,} collectives traced")
        lowered = trace.lower()
        say("compiling")
        program_ = lowered.compile()
        say("reading the compiled program")
        problems += against_compiled(found, compiled.collectives(program_.as_text(), sizes), not ragged)
        analysis = program_.memory_analysis()
    temporary = {"compiler": int(analysis.temp_size_in_bytes) if analysis else 0, "plan": _activations(run)}
    return _result(run, problems, held, groups, temporary, started)


def _result(run: spec.Run, problems: list[str], held: dict, groups: list[dict], temporary: dict, started: float) -> dict:
    forward = [g for g in groups if g["what"] == minimum.ROWS and g["phase"] == "forward"]
    layers = run.model.layers * run.compute.accumulate
    waves = run.routing.waves
    tokens = spec.tokens_per_step(run) // spec.devices(run) * run.model.layers
    return {
        "recipe": run.recipe,
        "key": run.key(),
        "chip": hardware.chip(run.compute.chip).label,
        "devices": spec.devices(run),
        "mesh": asdict(run.mesh),
        "bytes_per_device": held,
        "closed_form_bytes_per_device": closed_form(run),
        "collectives": groups,
        "all_to_all": {
            "per_layer_per_wave_forward": 0.0
            if work.gathered(run)
            else sum(g["executions"] for g in forward) / (layers * waves),
            "bytes_per_token_per_layer": sum(g["bytes_per_device"] for g in forward) / tokens,
        },
        "temporary_bytes_per_device": temporary,
        "usable_bytes": memory.USABLE * hardware.chip(run.compute.chip).memory_bytes,
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "ok": not problems,
        "problems": problems,
    }


def program(run: spec.Run, mesh: Any) -> tuple[Any, Any, Any]:
    """The jitted training step, and the shapes of its state and its batch."""
    from argosy.train import step

    return step.compiled(run), step.abstract(run, mesh), step.abstract_batch(run, mesh)


def _on_an_accelerator(run: spec.Run, sizes: dict[str, int]) -> list[Any]:
    """The collectives of the step as traced for a GPU: a CPU has no ragged all-to-all, its program is another one there."""
    import jax
    from jax.sharding import AbstractDevice

    from argosy import mesh as meshes
    from argosy.launch import collectives

    mesh = meshes.abstract(run).update(abstract_device=AbstractDevice("any", None, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        step, state, batch = program(run, mesh)
        return collectives.traced(step.trace(state, batch).jaxpr.jaxpr, sizes)


# ---- bytes ----------------------------------------------------------------------------------------


def kinds(state: Any, batch: Any) -> dict[str, Any]:
    """A state and a batch by kind; counters and the router's bias are counted with the parameters."""
    return {
        "params": (state.step, state.params, state.router_bias),
        "masters": getattr(state, "masters", None),
        "optimizer": state.opt,
        "batch": batch,
    }


def _held(tree: Any) -> dict[str, int]:
    """Bytes of abstract arrays on one device and in its share of the host, from shardings and memory kinds."""
    import jax

    found = dict.fromkeys(PLACES, 0)
    for x in jax.tree.leaves(tree):
        place = "host" if x.sharding.memory_kind == "pinned_host" else "device"
        found[place] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return found


def closed_form(run: spec.Run) -> dict[str, dict[str, float]]:
    """The plan's bytes by kind and place: `memory.steady`, the router's bias and a counter, and 13 bytes a token."""
    steady = memory.steady(run)
    names = {"params": "params", "masters": "masters", "optimizer": "optimizer_state"}
    found = {kind: {place: steady[place].get(names.get(kind, ""), 0.0) for place in PLACES} for kind in KINDS}
    found["params"]["device"] += 4.0 * run.model.layers * run.moe.experts + 4.0
    found["batch"]["device"] = 13.0 * work.tokens(run)
    return found


def bytes_problems(run: spec.Run, held: dict[str, dict[str, int]]) -> list[str]:
    """Kinds and places whose bytes are not the plan's."""
    planned = closed_form(run)
    return [
        f"{kind} take {held[kind][place]:,} bytes of {place} memory per device, the plan says {planned[kind][place]:,.0f}"
        for kind in KINDS
        for place in PLACES
        if abs(held[kind][place] - planned[kind][place]) > TOLERANCE * planned[kind][place]
    ]


def _activations(run: spec.Run) -> float:
    """The plan's bytes at the fullest moment beyond what stays between steps."""
    found = memory.plan(run)
    return found["per_device_bytes"]["device"]["total"] - found["steady_device_bytes"]


# ---- leaves ---------------------------------------------------------------------------------------


def undivided(run: spec.Run) -> list[str]:
    """Leaves with a dimension that does not divide over the mesh axes meant to divide it."""
    from argosy import leaf
    from argosy.model import transformer

    found = []
    for name, one in leaf.flatten(transformer.leaves(run)).items():
        for letter, size, part in zip(one.dims.split(), one.shape, one.spec, strict=True):
            over = (part,) if isinstance(part, str) else tuple(part or ())
            n = minimum.ways(run, over)
            if size % n:
                found.append(
                    f"{name} {one.shape}: dimension {letter} of {size:,} does not divide over {' x '.join(over)} = {n};"
                    f" nearest {spec.nearest_multiples(size, n)}"
                )
    return found


def replicated(run: spec.Run, state: Any) -> list[str]:
    """Arrays of the state that are whole on every device though their leaf is none of those that may be."""
    import jax

    from argosy import leaf, mesh
    from argosy.model import transformer

    if not minimum.axes(run, *mesh.FSDP):
        return []
    leaves, found = leaf.flatten(transformer.leaves(run)), []
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = leaf.name(path)
        part = next((one.part for key, one in leaves.items() if re.search(rf"(^|/){key}(/|$)", name)), None)
        used = {axis for dim in x.sharding.spec for axis in ((dim,) if isinstance(dim, str) else dim or ())}
        may = part in mesh.MAY_REPLICATE or (part == "routed" and run.mesh.expert == 1)  # nothing else divides experts
        if part and not may and not minimum.axes(run, *used):
            found.append(f"{name} {x.shape} ({part}) is whole on every device; only {', '.join(mesh.MAY_REPLICATE)} may be")
    return found


# ---- collectives ----------------------------------------------------------------------------------


def explain(run: spec.Run, found: Iterable[Any]) -> tuple[list[dict], list[str]]:
    """Collectives in groups of one purpose, phase, operation and axes, with their time; and those without a purpose."""
    purpose, ragged = _purposes(run), minimum.ragged_elements(run)
    groups: dict[tuple, list] = defaultdict(list)
    strange: Counter[str] = Counter()
    for one in found:
        what = purpose(one)
        if what is None:
            over = " x ".join(one.axes)
            strange[
                f"nothing explains this {one.op} over {over} in the {one.phase}: {one.elements:,} {one.dtype}, executed"
                f" {one.executions:,} times a step ({one.bytes * one.executions:,} bytes per device), from {one.source}"
            ] += 1
        if one.op == "ragged-all-to-all":
            one = replace(one, elements=ragged[1])
        groups[one.phase, what or "unexplained", one.op, one.axes].append(one)
    rows = []
    for (phase, what, op, over), members in groups.items():
        size = sum(one.bytes * one.executions for one in members)
        rows.append(
            {
                "op": op,
                "axis": "+".join(over),
                "link": minimum.link(run, over),
                "phase": phase,
                "executions": sum(one.executions for one in members),
                "bytes_per_device": size,
                "time_s": minimum.time_s(run, op, over, size),
                "what": what,
                "dtype": "+".join(sorted({one.dtype for one in members})),
                "sources": [source for source, _ in Counter(one.source for one in members).most_common(3)],
            }
        )
    order = ("forward", "recomputation", "backward", "optimizer")
    rows.sort(key=lambda row: (order.index(row["phase"]), -row["time_s"]))
    return rows, [text if n == 1 else f"{text}, {n} of them" for text, n in strange.items()]


def _purposes(run: spec.Run) -> Callable[[Any], str | None]:
    """What a collective is for, by operation, axes, phase and size; None if nothing explains it."""
    from argosy import leaf
    from argosy.model import transformer

    ragged = minimum.ragged_elements(run)[0]
    gathered = minimum.gathered_elements(run) if work.gathered(run) else {}
    fsdp, expert, everywhere = (minimum.axes(run, *names) for names in (minimum.FSDP, ("expert",), spec.AXES))
    outer = minimum.axes(run, "replica", "context")
    whole, parts, matrices = set(), set(), set()
    for one in leaf.flatten(transformer.leaves(run)).values():
        stacked = one.dims.startswith("L ")
        size = one.size // (one.shape[0] if stacked else 1)
        split = minimum.ways(run, tuple(axis for dim in one.spec for axis in ((dim,) if isinstance(dim, str) else dim or ())))
        divided = any(dim not in (None, "expert") for dim in one.spec)
        if divided:
            whole.add(size)
        parts.add((size // split, outer if divided else minimum.axes(run, *_rest(one.spec))))
        if divided and one.kind == "matrix":
            matrix = math.prod(one.shape[-2:])
            matrices.add(-(-one.size // matrix // minimum.ways(run, fsdp)) * matrix)
    few = 8 * max(run.moe.experts, run.model.layers * max(1, run.moe.shared_experts))  # bytes: two numbers per expert

    def purpose(one: Any) -> str | None:
        real = one.dtype in ("bfloat16", "float32")
        if one.phase == "optimizer":
            if one.axes == fsdp and one.op == "all-to-all" and one.elements in matrices:
                return minimum.MATRICES
            return minimum.NORMS if one.op == "all-reduce" and one.bytes <= few else None
        if one.op == "all-to-all" and one.axes == expert and real:
            return minimum.ROWS
        if one.op == "ragged-all-to-all" and one.axes == expert and real and one.elements == ragged:
            return minimum.ROWS
        if one.op in ("all-gather", "all-to-all", "reduce-scatter") and one.axes == expert and not real:
            return minimum.COUNTS
        if one.source.startswith(_GATHERED) and one.axes == expert and one.op in ("all-gather", "reduce-scatter"):
            return gathered.get(one.elements)  # by its line: weights may be as large
        if one.op == "all-gather" and one.axes == fsdp and one.elements in whole:
            return minimum.WEIGHTS
        if one.op == "reduce-scatter" and one.axes == fsdp and one.elements in whole:
            return minimum.SCATTERED
        if one.op == "all-reduce" and one.phase == "backward" and (one.elements, one.axes) in parts:
            return minimum.SUMMED
        if one.op == "all-reduce" and one.bytes <= few and set(one.axes) <= set(everywhere):
            return minimum.STATISTICS
        return None

    return purpose


def _rest(spec_: Any) -> tuple[str, ...]:
    """The axes that a sharding does not use."""
    used = {axis for dim in spec_ for axis in ((dim,) if isinstance(dim, str) else dim or ())}
    return tuple(axis for axis in spec.AXES if axis not in used)


def against_minimum(run: spec.Run, groups: list[dict]) -> list[str]:
    """Kinds of traffic that are not what the closed form says, by bytes; each group is given its share of it."""
    needed: dict[tuple, float] = defaultdict(float)
    for need in minimum.needs(run):
        needed[need.phase, need.what, need.op, "+".join(need.axes)] += need.bytes
    seen = {(g["phase"], g["what"], g["op"], g["axis"]): g for g in groups}
    for key, group in seen.items():
        free = group["what"] in (minimum.STATISTICS, minimum.NORMS, minimum.COUNTS)
        group["minimum_bytes"] = group["bytes_per_device"] if free else needed.get(key, 0.0)
    problems = []
    for phase, what, op, axis in sorted(set(needed) | {key for key, g in seen.items() if g["minimum_bytes"] is not None}):
        group = seen.get((phase, what, op, axis), {"bytes_per_device": 0, "minimum_bytes": needed[phase, what, op, axis]})
        have, need = group["bytes_per_device"], group["minimum_bytes"]
        if what != "unexplained" and abs(have - need) > TOLERANCE * need:
            problems.append(
                f"{what}, {phase}: {op} over {axis} moves {have:,} bytes per device in a step, the analytic minimum is"
                f" {need:,.0f}" + (f" (from {', '.join(group['sources'])})" if have else "")
            )
    return problems


def against_compiled(found: Iterable[Any], compiled: Counter, exact: bool = True) -> list[str]:
    """Collectives that the compiled program executes more often than the traced one, by operation, axes and size; and
    operations of which it executes less, by more than the tolerance (unless `exact` is False).

    The compiler may drop duplicates and join reductions, never add: what it adds, no line of the model asks for. Loops
    may be unrolled, so that executions are compared, not places in the text.
    """
    asked: Counter[tuple] = Counter()
    least: Counter[tuple] = Counter()  # recomputed ones may turn out to be duplicates
    for one in found:
        asked[one.op, one.axes, one.elements] += one.executions
        least[one.op, one.axes] += one.executions * one.elements * (one.phase != "recomputation")
    made: Counter[tuple] = Counter()
    names: dict[tuple, str] = {}
    for (one, name), n in compiled.items():
        key = (one.op, one.axes, one.elements)
        made[key] += n * one.executions
        names[key] = min(name, names.get(key, name), key=len)
    problems = [
        f"the compiler executes {op} over {' x '.join(axes)} of {elements:,} elements {n:,} times a step, the traced program"
        f" {asked[op, axes, elements]:,}: nothing explains the rest (one is {names[op, axes, elements][-100:]})"
        for (op, axes, elements), n in made.items()
        if n > asked[op, axes, elements]
    ]
    for (op, axes), want in sorted(least.items()):
        have = sum(n * key[2] for key, n in made.items() if key[:2] == (op, axes))
        if exact and have < (1 - TOLERANCE) * want:
            problems.append(
                f"the traced program moves {want:,} elements by {op} over {' x '.join(axes)}, recomputation left out;"
                f" the compiled one {have:,} in all"
            )
    return problems


if __name__ == "__main__":
    main()
