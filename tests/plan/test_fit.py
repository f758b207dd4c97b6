"""Choices of memory against every combination planned one by one, and against bytes and seconds written out by hand."""

import json

import pytest
from rich.console import Console

from argosy import spec
from argosy.plan import cost, fit, memory, sheet, work
from argosy.runs import marin_535b, pocket


def all_planned(run, accumulations):
    """Every combination as a user would ask for it, in plain loops: settings -> (fits, seconds per step)."""
    found = {}
    for remat in ("none", "block", "block_keep_dispatch"):
        for parts in accumulations:
            for params, masters in (("fp32", "device"), ("bf16", "device"), ("bf16", "pinned_host")):
                for state in ("device", "pinned_host"):
                    words = (remat, parts, params, masters, state)
                    names = ("remat", "accumulate", "params", "masters", "optimizer_state")
                    settings = [f"compute.{k}={v}" for k, v in zip(names, words, strict=True)]
                    planned = sheet.plan(spec.override(run, settings))
                    found[tuple(settings)] = (planned["memory"]["fits"], planned["time"]["step_s"])
    return found


@pytest.mark.parametrize(
    ("run", "accumulations"),
    [
        (marin_535b.run(), (1, 2, 4, 8, 16)),
        (spec.override(marin_535b.ragged(), ["compute.chip=b200"]), (1, 2, 4, 8, 16)),
        (
            spec.override(marin_535b.rung(2048), ["mesh.replica=4", "data.batch_seqs=3072", "evals.batch_seqs=256"]),
            (1, 2, 3, 4, 6, 12),
        ),
    ],
)
def test_the_chosen_is_the_fastest_of_all_that_fit(run, accumulations):
    """Fails when a combination is forgotten, one that does not fit is taken, or a faster one passed over."""
    planned, found = all_planned(run, accumulations), fit.fit(run)
    assert len(found["candidates"]) == len(planned)
    assert sum(c["fits"] for c in found["candidates"]) == sum(fits for fits, _ in planned.values())
    best = min(step_s for fits, step_s in planned.values() if fits)
    assert found["chosen"]["step_s"] == best
    after = sheet.plan(spec.override(run, found["set"]))
    assert (after["memory"]["fits"], after["time"]["step_s"]) == (True, best)
    assert [c["step_s"] for c in found["candidates"]] == sorted(step_s for _, step_s in planned.values())


def test_alternatives_differ_in_one_choice_and_say_what_it_costs():
    """Fails when the table's neighbours are not neighbours, or one is missing."""
    found = fit.fit(marin_535b.run())
    chosen, others = found["chosen"], found["alternatives"]
    keys = ("remat", "accumulate", "optimizer_state")
    for c in others:
        assert (
            sum(c[k] != chosen[k] for k in keys) + ((c["params"], c["masters"]) != (chosen["params"], chosen["masters"])) == 1
        )
    assert len(others) == 2 + 4 + 2 + 1  # remats, parts, weights, optimizer state
    assert found["asked"] in found["candidates"]
    json.dumps(found, allow_nan=False)


def test_what_is_not_offered():
    """Fails when bf16 weights are offered for fp32 products, host memory where there is none, parts to the balance loss."""
    found = fit.fit(pocket.run())
    assert {c["params"] for c in found["candidates"]} == {"fp32"}
    assert {c["optimizer_state"] for c in found["candidates"]} == {"device"}
    assert {c["remat"] for c in found["candidates"]} == {"none", "block"}  # one device receives no rows to keep
    assert any("change the mathematics" in note for note in found["notes"])
    assert found["set"] == []
    uneven = fit.fit(spec.override(pocket.run(), ["routing.balance=aux_loss"]))
    assert {c["accumulate"] for c in uneven["candidates"]} == {1}


@pytest.mark.parametrize("chip", ["h200", "h100"])
def test_where_nothing_fits(chip):
    """Fails when the miss is not that of the smallest combination, or what is called nearest does not fit, or is not nearest."""
    run = spec.override(marin_535b.run(), [f"compute.chip={chip}"])
    found = fit.fit(run)
    assert found["chosen"] is None and found["set"] == [] and found["alternatives"] == []
    planned = [memory.plan(spec.override(run, [f"compute.{k}={c[k]}" for k in fit.KNOBS])) for c in found["candidates"]]
    device = [p["per_device_bytes"]["device"]["total"] - p["device_usable_bytes"] for p in planned]
    host = [p["per_device_bytes"]["host"]["total"] - p["host_usable_bytes"] for p in planned]
    assert found["nothing"]["over_bytes"] == min(max(pair) for pair in zip(device, host, strict=True)) > 0
    assert found["nothing"]["nearest"]
    for near in found["nothing"]["nearest"]:
        assert fit.fit(spec.override(run, near["set"]))["chosen"]
        if near["set"][0].startswith("model.layers="):
            one_more = int(near["set"][0].removeprefix("model.layers=")) + 1
            assert fit.fit(spec.override(run, [f"model.layers={one_more}"]))["chosen"] is None


@pytest.mark.parametrize("run", [marin_535b.run(), pocket.run(), spec.override(marin_535b.run(), ["compute.chip=h200"])])
def test_it_is_shown_in_eighty_columns(run, capsys):
    """Fails when a cell is cut off."""
    fit.show(fit.fit(run), Console(width=80, highlight=False))
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    assert all(f"--set {s}" in out for s in fit.fit(run)["set"])


# ---- closed forms --------------------------------------------------------------------------------

HERO = marin_535b.run()
ROUTED = 48 * 6 * 3 * 3072 * 3072  # of one device: layers, local experts, gate up down
PLAIN = 128_256 * 6144 + 98 * 6144 + 48 * 3072 + 48 * 4 * (12 * 128 + 2 * 6144)  # embedding, gains, convolutions
GATES = 48 * 6144 * (384 + 48 / 64)  # router, and its share of the head gates
READOUT = 6144 * 128_256 / 64
REST = 48 * (2 * 6144 * 48 * 128 + 2 * 6144 * 12 * 128 + 2 * 6144 * 3072 + 2 * 3 * 6144 * 3072) / 64 + 98 * 2 * 6144 * 128 / 64
MINE = ROUTED + PLAIN + GATES + READOUT + REST


def seconds(run, name):
    return next((r for r in cost.resources(run) if r.name == name), None)


def test_bytes_over_the_host_link_by_hand():
    """Fails when masters or moments do not come once per update, or what is float32 already comes too."""
    masters, state = 4 * (MINE - PLAIN), 4 * (ROUTED + REST + 2 * (PLAIN + GATES + READOUT))
    choices = {
        ("bf16", "pinned_host", "pinned_host"): masters + state,
        ("bf16", "pinned_host", "device"): masters,
        ("bf16", "device", "pinned_host"): state,
        ("fp32", "device", "pinned_host"): state,
    }
    for (params, where, optimizer), expected in choices.items():
        run = spec.override(
            HERO, [f"compute.params={params}", f"compute.masters={where}", f"compute.optimizer_state={optimizer}"]
        )
        link = seconds(run, "host link")
        assert link.amount == pytest.approx(expected, rel=1e-9)
        assert link.floor_s == pytest.approx(expected / 225e9, rel=1e-9)
        assert sum(memory.steady(run)["host"].values()) == pytest.approx(expected, rel=1e-9)
    nothing = spec.override(HERO, ["compute.masters=device", "compute.optimizer_state=device"])
    assert seconds(nothing, "host link") is None


def test_accumulation_by_hand():
    """Fails when a part does not gather and reduce again, or its sums and counts take no memory."""
    one, four = work.step(HERO), work.step(spec.override(HERO, ["compute.accumulate=4"]))
    assert four.fsdp == pytest.approx(4 * one.fsdp)
    assert four.reduce == pytest.approx(4 * one.reduce)
    for same in ("products", "attention", "expert", "host"):
        assert getattr(four, same) == pytest.approx(getattr(one, same))
    given = 2 * (MINE - PLAIN) + 4 * PLAIN  # the gradients of one part
    counted = 12 * 4 * 48 * 384 * 20_003  # the histograms of a part
    assert four.memory - one.memory == pytest.approx(4 * (given + 8 * MINE + counted), rel=1e-6)  # the sum read and written
    whole, parts = (memory.moments(run)["backward"] for run in (HERO, spec.override(HERO, ["compute.accumulate=4"])))
    assert parts["accumulated"] == pytest.approx(4 * MINE)
    assert parts["margins"] == 2 * 4 * 48 * 384 * 20_003
    assert parts["saved"] == whole["saved"] / 4
    assert parts["gradients"] == whole["gradients"] == pytest.approx(given)
    assert "accumulated" not in whole and "margins" not in whole


def test_rounding_float32_weights_by_hand():
    """Fails when float32 weights are not read and rounded before each product: forward, again, backward."""
    fp32 = spec.override(HERO, ["compute.params=fp32", "compute.masters=device"])
    bf16 = spec.override(HERO, ["compute.masters=device"])
    assert work.step(fp32).memory - work.step(bf16).memory == pytest.approx(3 * 6 * (MINE - PLAIN), rel=1e-6)
