"""The rehearsal against closed forms written out here, planted faults, and the command as a user meets it."""

import io
import json
import math
import os
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from argosy import cli, leaf, mesh, runs, spec
from argosy.launch import collectives, compiled, minimum, rehearse, report
from argosy.leaf import Leaf
from argosy.model import norm, transformer
from argosy.plan import work
from argosy.runs import marin_535b

SMALL = [
    "model.vocab=64", "model.width=32", "model.layers=2", "model.heads=2", "model.head_width=8", "model.kv_heads_local=2",
    "model.kv_heads_global=1", "model.window=8", "model.gate_rank=4", "moe.experts=8", "moe.experts_per_token=2", "moe.hidden=8",
    "moe.latent_width=16", "moe.shared_hidden=8", "data.seq_len=16", "data.batch_seqs=16", "evals.batch_seqs=8",
    "compute.attention_block=8", "compute.readout_block_tokens=16", "compute.precision=bf16",
]  # fmt: skip
POOLED = ["mesh.replica=2", "mesh.expert=4", "routing.exchange=pooled_wave", "routing.waves=2"]


def small(pocket, *settings: str) -> spec.Run:
    return spec.override(pocket, [*SMALL, *settings])


def traced(run: spec.Run):
    """The collectives of a run's step, its groups, and all problems that need no compiler."""
    devices = mesh.make(run)
    with jax.set_mesh(devices):
        step, state, batch = rehearse.program(run, devices)
        held = {kind: rehearse._held(tree) for kind, tree in rehearse.kinds(state, batch).items()}
        found = collectives.traced(step.trace(state, batch).jaxpr.jaxpr, dict(zip(spec.AXES, mesh.sizes(run), strict=True)))
        problems = rehearse.bytes_problems(run, held) + rehearse.replicated(run, state)
    groups, unexplained = rehearse.explain(run, found)
    return found, groups, problems + unexplained + rehearse.against_minimum(run, groups)


@pytest.mark.parametrize(("remat", "again"), [("none", (0, 0)), ("block", (1, 1)), ("block_keep_dispatch", (0, 1))])
def test_rows_travel_as_often_and_as_far_as_the_algorithm_says(pocket, remat, again):
    """Fails when a phase has other all-to-alls than out and back per wave and layer, or their bytes are not P, M, W, X's."""
    run = small(pocket, *POOLED, f"compute.remat={remat}")
    found, groups, problems = traced(run)
    assert problems == []
    layers, waves, ranks, width = 2, 2, 4, 16
    assignments = 16 * 16 // 8 * 2
    pool = math.ceil(1.15 * assignments / (ranks * waves))
    header = math.ceil(pool / width)
    out, back = (ranks * rows * width * 2 for rows in (pool + header, pool))
    for phase, (o, b) in {"forward": (1, 1), "recomputation": again, "backward": (1, 1)}.items():
        rows = [one for one in found if one.op == "all-to-all" and one.phase == phase]
        assert sum(one.executions for one in rows) == layers * waves * (o + b)
        assert sum(one.executions * one.bytes for one in rows) == layers * waves * (o * out + b * back)
        assert {(one.axes, one.dtype) for one in rows} <= {(("expert",), "bfloat16")}
    forward = next(g for g in groups if g["what"] == minimum.ROWS and g["phase"] == "forward")
    assert (forward["executions"], forward["axis"], forward["link"]) == (8, "expert", "across racks")  # a CPU's domain is 1


@pytest.mark.parametrize(
    ("exchange", "room", "parts"),
    [("ragged", 2**18, 1), ("pooled_wave", 4 * 32 * 2 // 4, 4)],
)
@pytest.mark.parametrize(("remat", "again"), [("none", (0, 0, 0)), ("block", (1, 1, 1)), ("block_keep_dispatch", (0, 1, 1))])
def test_dropless_over_ranks_gathers_every_token(pocket, monkeypatch, exchange, room, parts, remat, again):
    """Fails when the tokens of a group are not gathered, and their float32 sums not scattered, once per layer and part;
    their gradients the other way round; or when a weight as large as they are is taken for them."""
    monkeypatch.setattr(work, "GATHERED_ROWS", room)
    settings = ["mesh.replica=2", "mesh.expert=4", f"routing.exchange={exchange}", "routing.capacity=dropless"]
    run = small(pocket, *settings, f"compute.remat={remat}")
    _, groups, problems = traced(run)
    assert problems == []
    layers, ranks, tokens, width, chosen = 2, 4, 16 * 16 // 8, 16, 2
    rows, shares = layers * ranks * tokens * width, layers * ranks * tokens * chosen
    out, back, routed = again
    want = {
        ("forward", "all-gather"): (2 * rows, 4 * shares),
        ("forward", "reduce-scatter"): (4 * rows, 0),
        ("recomputation", "all-gather"): (out * 2 * rows, routed * 4 * shares),
        ("recomputation", "reduce-scatter"): (back * 4 * rows, 0),
        ("backward", "all-gather"): (4 * rows, 0),
        ("backward", "reduce-scatter"): (2 * rows, 4 * shares),
    }
    seen = {(g["phase"], g["op"], g["what"]): (g["bytes_per_device"], g["executions"]) for g in groups}
    for (phase, op), sizes in want.items():
        for what, size in zip((minimum.ROWS, minimum.SHARES), sizes, strict=True):
            assert seen.get((phase, op, what), (0, 0)) == (size, layers * parts * bool(size)), (phase, op, what)
    planned = {key: tokens * layers * n for key, n in work.gathered_sides(run).items()}
    for key, (moved, about) in want.items():  # beside them the experts' numbers, as large, and a byte each of `valid`
        few = (about + layers * ranks * tokens) * (key[1] == "all-gather") if about else 0
        assert planned[key] == moved + about + few, key


def elements(run: spec.Run):
    """Elements of one execution of each leaf's gradient, written out: (divided leaves in blocks, outside, whole ones)."""
    d, r, v = run.model.width, run.model.gate_rank, run.model.vocab
    heads, kv, z, g, j = 16, 16, run.moe.latent_width, 8, 2
    block = [d * heads, d * kv, d * kv, heads * d, d * run.model.heads, d * z, z * d, *[j * d * g] * 3, *[d * r] * 4]
    outside = [d * v, *[d * r] * 4]
    return block, outside, [d, d, z, 4 * kv, 4 * d, 4 * d, d * run.moe.experts], [v * d, d, d]


@pytest.mark.parametrize(
    "settings",
    [
        ["mesh.replica=2", "mesh.data=4", "compute.remat=block"],
        ["mesh.replica=8", "optim.rule=adamw"],
        ["mesh.replica=2", "mesh.data=2", "mesh.expert=2", "routing.exchange=pooled_wave", "optim.radius=per_expert"],
        ["mesh.replica=4", "mesh.expert=2", "routing.exchange=ragged", "routing.waves=2"],
        [*POOLED, "compute.params=bf16", "compute.masters=pinned_host", "compute.optimizer_state=pinned_host"],
        [*POOLED, "compute.accumulate=2", "compute.remat=block"],
        ["mesh.data=8", "moe.latent=none", "moe.shared_experts=0", "model.convolution=none", "routing.balance=sign_bias"],
    ],
    ids=lambda settings: " ".join(s.split(".")[1] for s in settings),
)
def test_every_byte_of_every_choice_is_explained(pocket, settings):
    """Fails when bytes held, or moved by any collective, depart from the closed form for some mesh, transport or memory."""
    run = small(pocket, *settings)
    if run.routing.exchange == "ragged":
        sizes = dict(zip(spec.AXES, mesh.sizes(run), strict=True))
        groups, problems = rehearse.explain(run, rehearse._on_an_accelerator(run, sizes))
        problems += rehearse.against_minimum(run, groups)
        rows = [g for g in groups if g["op"] == "ragged-all-to-all"]
        assert [g["executions"] for g in rows] == [2 * 2 * 2] * 2  # layers, chunks, ways; forward and backward
        assert {g["bytes_per_device"] for g in rows} == {2 * 2 * (16 * 16 // 8 * 2) * 16 * 2}
    else:
        *_, problems = traced(run)
    assert problems == []


def test_gradients_of_divided_weights_are_scattered_then_summed(pocket):
    """Fails when weights are not gathered once forward, or a gradient is summed over more than who holds the same part."""
    run = small(pocket, "mesh.replica=2", "mesh.data=4")
    found, _, _ = traced(run)
    block, outside, whole, once = elements(run)

    def seen(op: str, phase: str, axes: tuple[str, ...], least: int = 0) -> Counter:
        rows = [one for one in found if (one.op, one.phase, one.axes) == (op, phase, axes) and one.elements > least]
        total: Counter = Counter()
        for one in rows:
            total[one.elements] += one.executions
        return total

    divided = Counter({n: 2 * k for n, k in Counter(block).items()}) + Counter(outside)
    assert seen("all-gather", "forward", ("data",)) == divided
    assert seen("reduce-scatter", "backward", ("data",)) == divided
    assert seen("all-reduce", "backward", ("replica",)) == Counter({n // 4: k for n, k in divided.items()})
    everywhere = Counter({n: 2 * k for n, k in Counter(whole).items()}) + Counter(once)
    routed = Counter({8 * 16 * 8: 3 * 2})
    assert seen("all-reduce", "backward", ("replica", "data")) == everywhere + routed


# ---- planted faults --------------------------------------------------------------------------------


def planted(monkeypatch, change):
    """The model's leaves with one changed."""
    leaves = transformer.leaves

    def changed(run):
        return jax.tree_util.tree_map_with_path(
            lambda path, one: change(one) if leaf.name(path) == "blocks/attention/q" else one, leaves(run), is_leaf=leaf.is_leaf
        )

    monkeypatch.setattr(transformer, "leaves", changed)


def in_this_process(monkeypatch):
    monkeypatch.setattr(rehearse, "rehearse", rehearse.audit)


def test_a_leaf_made_whole_is_a_problem(pocket, monkeypatch):
    planted(monkeypatch, lambda one: Leaf(one.dims, one.shape, P(None, None, None), one.init, one.kind, one.part))
    *_, problems = traced(small(pocket, *POOLED))
    assert any(p.startswith("params/blocks/attention/q") and "whole on every device" in p for p in problems)
    assert any(p.startswith("opt/blocks/attention/q") for p in problems)


def test_a_shape_that_does_not_divide_is_a_problem_and_status_one(monkeypatch, capsys, tmp_path):
    """Fails when it ends in a traceback, or is compiled all the same."""
    planted(monkeypatch, lambda one: Leaf(one.dims, (2, 33, 16), one.spec, one.init, one.kind, one.part))
    in_this_process(monkeypatch)
    sets = [word for setting in [*SMALL, *POOLED] for word in ("--set", setting)]
    with pytest.raises(SystemExit) as stop:
        cli.main(["rehearse", "pocket", *sets, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert stop.value.code == 1
    assert not found["ok"]
    assert (
        "blocks/attention/q (2, 33, 16): dimension D of 33 does not divide over data x expert = 4; nearest 32 or 36"
        in (found["problems"][0])
    )


def test_a_collective_that_nothing_explains_is_a_problem_with_its_line(pocket, monkeypatch):
    gated = norm.gated_norm

    def gathering(p, x):
        return gated(p, jax.sharding.reshard(jax.sharding.reshard(x, P()), mesh.B_S_D))

    monkeypatch.setattr(norm, "gated_norm", gathering)
    *_, problems = traced(small(pocket, *POOLED))
    first = next(p for p in problems if p.startswith("nothing explains this all-gather over replica x expert in the forward"))
    assert f"{16 * 16 * 32:,} bfloat16" in first and "model/transformer.py" in first


def test_what_the_compiler_adds_is_a_problem():
    """Fails when a gather that no line of a program asks for, but its partitioning does, goes unseen."""
    run = spec.override(runs.find("pocket"), ["mesh.replica=8", "data.batch_seqs=8", "evals.batch_seqs=8"])
    sizes = dict(zip(spec.AXES, mesh.sizes(run), strict=True))
    devices = mesh.make(run)
    with jax.set_mesh(devices):
        x = jax.ShapeDtypeStruct((8, 24), jnp.float32, sharding=jax.NamedSharding(devices, P("replica", None)))
        step = jax.jit(
            lambda x: jax.lax.scan(lambda c, _: (c + jax.sharding.reshard(x, P()), None), jnp.zeros(x.shape), length=3)[0]
        )
        trace = step.trace(x)
        found = collectives.traced(trace.jaxpr.jaxpr, sizes)
        made = compiled.collectives(trace.lower().compile().as_text(), sizes)
    assert [(one.op, one.axes, one.elements, one.executions) for one in found] == [("all-gather", ("replica",), 192, 3)]
    assert not [p for p in rehearse.against_compiled(found, made) if "explains" in p]
    assert any("nothing explains the rest" in p for p in rehearse.against_compiled([], made))


# ---- links and text ------------------------------------------------------------------------------


def test_links_and_times_of_the_reference_run():
    """Fails when traffic inside a rack of 72 is given the network's rate, or the other way round."""
    run = marin_535b.run()
    assert minimum.link(run, ("expert",)) == "inside the rack"
    assert minimum.link(run, ("replica",)) == minimum.link(run, ("replica", "expert")) == "across racks"
    assert minimum.time_s(run, "all-to-all", ("expert",), 64e9) == pytest.approx(63e9 / 900e9)
    assert minimum.time_s(run, "all-gather", ("expert",), 64e9) == pytest.approx(63e9 / 900e9)
    assert minimum.time_s(run, "all-reduce", ("replica",), 11e9) == pytest.approx(20e9 / 50e9)
    both = 2 * 64e9 * 63 / 64 / 900e9 + 2 * 1e9 * 10 / 11 / 50e9
    assert minimum.time_s(run, "all-reduce", ("replica", "expert"), 64e9) == pytest.approx(both)
    assert minimum.pool(run) == (3141, 2)
    wide = spec.override(run, ["moe.latent=none"])
    rows = {name: next(n.bytes for n in minimum.needs(r) if n.what == minimum.ROWS and n.phase == "forward")
            for name, r in (("latent", run), ("none", wide))}  # fmt: skip
    assert rows["latent"] / 48 / 65_536 == pytest.approx(113_112)
    assert rows["none"] / rows["latent"] == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true", ("expert",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("replica",)),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ("expert",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ("replica",)),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}", ("expert",)),
        ("replica_groups=mesh['a'=8,'b'=1] {'a'}, dimensions={0}", ("replica", "expert")),
    ],
)
def test_groups_are_read_in_every_notation(groups, axes):
    """Fails when a group of devices is taken for that of other mesh axes; loops multiply, several operands count each."""
    text = f"""
%body.1 (p: (f32[8])) -> (f32[8]) {{
  %ar = (f32[2,8]{{1,0}}, f32[4]{{0}}) all-reduce(%x, %y), {groups}, to_apply=%add, metadata={{op_name="jit(f)/g"}}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %w = (f32[8]) while(%t), condition=%c, body=%body.1, backend_config={{"known_trip_count":{{"n":"12"}}}}
}}
"""
    found = compiled.collectives(text, {"replica": 2, "data": 1, "context": 1, "expert": 4})
    assert found == {
        (compiled.Found("all-reduce", axes, 16, 12), "jit(f)/g"): 1,
        (compiled.Found("all-reduce", axes, 4, 12), "jit(f)/g"): 1,
    }


# ---- the command ---------------------------------------------------------------------------------


def test_other_numbers_of_devices():
    run = runs.find("marin-535b")
    assert rehearse.scaled(run, 704) == run
    assert rehearse.scaled(run, 64).mesh == spec.Mesh(replica=1, data=1, context=1, expert=64)
    assert rehearse.scaled(run, 128).evals.batch_seqs == 768
    with pytest.raises(ValueError, match=r"--devices 700 .* 64 devices .* nearest legal 512, 704"):
        rehearse.scaled(run, 700)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["marin-535b", "--devices", "100"], ["--devices 100", "64, 128"]),
        (["marin-535b", "--devices", "0"], ["--devices 0", "64"]),
        (["marin-535b", "--set", "routing.sender_capacity=0"], ["sender_capacity", "above 0"]),
        (["marin-535b", "--set", "moe.experts=380"], ["moe.experts", "384"]),
        (["marin-535b", "--set", "routing.waves=4"], ["routing.waves", "3"]),
        (["marin-535b", "--set", "data.batch_seqs=11000"], ["11,000", "10560 or 11264"]),
        (["marin-535b", "--set", "routing.exchange=pooled"], ["pooled_wave"]),
        (["marin-535b", "--devices", "11264"], ["11,264 devices", "8,192", "--devices 8192"]),
        (["marin-535b", "--set", "routing.exchange=dense"], ["the oracle", "pooled_wave"]),
        (["marin"], ["marin-535b"]),
    ],
)
def test_bad_input_is_refused_before_any_compilation(capsys, monkeypatch, argv, words):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["rehearse", *argv])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err.startswith("argosy: ") and "Traceback" not in err
    for word in words:
        assert word in err, err


def test_what_cannot_be_trained_is_refused_by_the_process_too():
    """Fails when a run that training refuses is compiled, or its refusal is lost between the processes."""
    run = spec.override(runs.find("pocket"), ["mesh.context=2"])
    with pytest.raises(ValueError, match=r"mesh.context=2 can be planned but not yet trained"):
        rehearse.rehearse(run, lambda text: text.startswith("starting ") or pytest.fail(text))


KEYS = {"devices", "mesh", "bytes_per_device", "collectives", "all_to_all", "ok", "problems"}


def check_json(found: dict) -> None:
    assert set(found) >= KEYS
    assert set(found["bytes_per_device"]) == {"params", "masters", "optimizer", "batch"}
    assert all(set(places) == {"device", "host"} for places in found["bytes_per_device"].values())
    for row in found["collectives"]:
        assert set(row) >= {"op", "axis", "link", "phase", "executions", "bytes_per_device", "time_s"}
    assert set(found["all_to_all"]) == {"per_layer_per_wave_forward", "bytes_per_token_per_layer"}


@pytest.mark.parametrize(
    ("choice", "a2a"), [("routing.capacity=bounded", 2), pytest.param("routing.capacity=dropless", 0, marks=pytest.mark.slow)]
)
def test_the_command_whole(tmp_path, choice, a2a):
    """Fails when the compiled program has what the traced one does not explain, or JSON is not alone on standard output."""
    sets = [word for setting in [*SMALL, *POOLED, "model.layers=1", choice] for word in ("--set", setting)]
    command = [sys.executable, "-m", "argosy.cli", "rehearse", "pocket", *sets, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    check_json(found)
    assert found["ok"] and found["problems"] == []
    assert found["devices"] == 8
    assert found["all_to_all"]["per_layer_per_wave_forward"] == a2a
    assert "compiling" in done.stderr
    for width in (80, 100):
        out = io.StringIO()
        report.show(found, Console(file=out, width=width, no_color=True))
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width and "…" not in out.getvalue()
        assert any(line.startswith("Ready.") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in runs.RECIPES if name.startswith("marin")])
def test_the_reference_run_and_its_rungs(name):
    """Fails when the program of 704 devices holds or moves anything that is not needed, or takes a laptop too long."""
    run = runs.find(name)
    found = rehearse.rehearse(run, lambda text: None)
    check_json(found)
    assert found["problems"] == []
    assert found["devices"] == spec.devices(run)
    assert found["peak_memory_bytes"] < 8e9
    if name == "marin-535b":
        assert found["all_to_all"] == {"per_layer_per_wave_forward": 2.0, "bytes_per_token_per_layer": pytest.approx(113_112)}
        assert found["bytes_per_device"]["masters"]["host"] == pytest.approx(
            2 * found["bytes_per_device"]["params"]["device"], rel=0.2
        )
