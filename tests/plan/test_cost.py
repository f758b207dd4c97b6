"""Time and money: published step times, bytes by hand, and properties that no plan may break."""

import datetime
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy import spec
from argosy.plan import cost, hardware, memory, work
from argosy.runs import marin_535b, pocket
from argosy.spec import Mesh, Run

CHIPS = sorted(hardware.CHIPS)


def meshed(run: Run, replica: int, expert: int, seqs: int, chip: str = "gb200", seq_len: int = 4096, data: int = 1) -> Run:
    chips = replica * expert * data
    return replace(
        run,
        mesh=Mesh(replica=replica, data=data, context=1, expert=expert),
        data=replace(run.data, batch_seqs=seqs * chips, seq_len=seq_len),
        evals=replace(run.evals, batch_seqs=chips),
        compute=replace(run.compute, chip=chip),
        routing=replace(run.routing, exchange="pooled_wave" if expert > 1 else "local", waves=1),
    )


@pytest.mark.parametrize(
    ("run", "published"),
    [
        (marin_535b.run(), 18.45),  # reference_run 4: 18.4-18.5 s per step
        (marin_535b.ragged(), 16.8),
        (marin_535b.rung(2048), 46_137_344 / 24e6),
    ],
)
def test_published_step_times(run, published):
    """Fails when a predicted step leaves 10% of a published one."""
    assert cost.step_s(run) == pytest.approx(published, rel=0.10)


@pytest.mark.parametrize(("seq_len", "published"), [(8192, -0.016), (16_384, -0.031)])
def test_published_costs_of_context(seq_len, published):
    """Fails when the predicted loss of tokens per second is more than half a point off."""
    run = marin_535b.ragged()
    one = replace(meshed(run, 1, 64, 16), routing=run.routing)
    longer = replace(meshed(run, 1, 64, 16 * 4096 // seq_len, seq_len=seq_len), routing=run.routing)
    assert cost.step_s(one) / cost.step_s(longer) - 1 == pytest.approx(published, abs=0.005)


def test_the_benchmark_passes():
    """Fails when any published step time, also those outside the fit, is missed by more than 10%."""
    script = Path(__file__).parents[2] / "bench" / "plan.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "H100" in done.stdout


def test_all_to_all_bytes_by_hand():
    """Fails when a token's rows do not cost 113 kB per layer forward (expert_parallel A1)."""
    run = marin_535b.run()
    rows = math.ceil(1.15 * 65_536 * 8 / (64 * 3))  # per destination and wave
    forward = 2 * 3 * 64 * rows * 3072 * 2 / 65_536  # out and back, three waves, bf16
    assert forward == pytest.approx(113e3, rel=0.001)
    sides = work.step(run).expert / (65_536 * 48) * 64 / 63  # the rank itself is no transfer
    assert sides == pytest.approx(3 * forward, rel=0.001)  # forward, recomputed, backward


def test_the_deadline_of_the_reference_run():
    """Fails when 390,251 steps of about 18.45 s are not the plan of about 100 days."""
    found = cost.time(marin_535b.run())
    assert found["step_days"] == pytest.approx(83, rel=0.10)
    assert found["days"] == pytest.approx(100, rel=0.10)
    assert found["mfu"] == pytest.approx(0.213, rel=0.10)


def test_newton_schulz_by_hand():
    """Fails when a square expert matrix does not cost 30 n^3 FLOPs, or a rank does not do its share alone."""
    run = marin_535b.run()
    without = replace(run, optim=replace(run.optim, rule="adamw"))
    experts = 48 * 6 * 3 * 30 * 3072**3
    spent = work.step(run).products - work.step(without).products
    assert experts < spent < 1.1 * experts


# Plain values: the type checker of the tests draws random numbers, which strategies must not.
shapes = st.fixed_dictionaries(
    {
        "width": st.sampled_from([768, 1536]),
        "replica": st.sampled_from([1, 2, 11]),
        "expert": st.sampled_from([1, 8, 64]),
        "data": st.sampled_from([1, 2]),
        "seqs": st.sampled_from([1, 4, 8]),
        "chip": st.sampled_from(CHIPS),
        "remat": st.sampled_from(["none", "block", "block_keep_dispatch"]),
    }
)


def built(shape: dict, replicas: int = 1) -> Run:
    run = meshed(
        marin_535b.rung(shape["width"]),
        shape["replica"] * replicas,
        shape["expert"],
        shape["seqs"],
        shape["chip"],
        data=shape["data"],
    )
    return replace(run, compute=replace(run.compute, remat=shape["remat"]))


@settings(max_examples=60, deadline=None)
@given(shape=shapes)
def test_no_step_beats_its_floor(shape):
    """Fails when efficiencies and hiding make a step faster than its busiest resource, or parts do not add up."""
    found = cost.time(built(shape))
    assert found["step_s"] == pytest.approx(sum(r["step_s"] for r in found["resources"]))
    assert found["step_s"] >= found["floor_step_s"] > 0
    assert all(r["amount"] > 0 and r["per_s"] > 0 for r in found["resources"])
    assert 0 < found["mfu_no_head"] < found["mfu"] < 1


def test_transfers_hide_only_behind_other_work():
    """Fails when half of a transfer hides behind a step that has nothing else to do."""
    run = meshed(marin_535b.rung(1536), 64, 1, 1, "a100", seq_len=64)
    parts = {r.name: r for r in cost.resources(run)}
    moved = (parts["host link"].floor_s + parts["gradients reduced"].floor_s) / 0.8  # both reach 0.8 of their rate
    other = parts["products"].step_s + parts["attention"].step_s + parts["memory traffic"].step_s
    assert other < 0.5 * moved
    assert cost.step_s(run) == pytest.approx(moved)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, more=st.sampled_from([2, 3]))
def test_more_chips_train_no_slower(shape, more):
    """Fails when the same work per chip on more replicas loses tokens per second."""
    assert cost.time(built(shape, more))["tokens_per_s"] > cost.time(built(shape))["tokens_per_s"]


@settings(max_examples=30, deadline=None)
@given(shape=shapes, factor=st.integers(2, 50), low=st.floats(0.1, 0.9), high=st.floats(0.91, 1.0))
def test_longer_runs_and_lower_goodput_take_longer(shape, factor, low, high):
    """Fails when days do not rise with the horizon, or fall with goodput."""
    run = built(shape)
    longer = replace(run, optim=replace(run.optim, horizon_tokens=run.optim.horizon_tokens * factor))
    assert cost.time(longer)["days"] > cost.time(run)["days"]
    assert cost.time(run, low)["days"] > cost.time(run, high)["days"]


@settings(max_examples=30, deadline=None)
@given(shape=shapes)
def test_recomputing_trades_time_for_memory(shape):
    """Fails when recomputation costs no time, or saves no memory at the backward pass's start."""
    kept, again = built({**shape, "remat": "none"}), built({**shape, "remat": "block"})
    assert work.step(again).products > work.step(kept).products
    assert cost.step_s(again) >= cost.step_s(kept) * (1 - 1e-9)  # equal where transfers hide all other work
    assert memory.moments(again)["loss"]["saved"] < memory.moments(kept)["loss"]["saved"]


def test_faster_chips_are_faster():
    """Fails when a chip that is better in every rate takes longer."""
    order = [cost.step_s(meshed(marin_535b.rung(1536), 8, 8, 16, chip)) for chip in ("gb200", "b200", "h200", "h100", "a100")]
    assert order == sorted(order)


def test_leaving_the_domain_costs():
    """Fails when experts across the network are as fast as inside a domain."""
    inside, outside = (meshed(marin_535b.rung(1536), 1, 64, 16, chip) for chip in ("gb200", "b200"))
    seconds = [next(r for r in cost.resources(run) if r.name == "expert all-to-all").step_s for run in (inside, outside)]
    assert seconds[1] > 5 * seconds[0]


def test_dropless_traffic_is_named_for_what_it_is():
    """Fails when tokens that are gathered over the ranks are called an all-to-all."""
    names = [
        {r.name for r in cost.resources(spec.override(marin_535b.run(), [f"routing.capacity={c}"]))}
        for c in ("bounded", "dropless")
    ]
    assert names[0] - names[1] == {"expert all-to-all"} and names[1] - names[0] == {"tokens gathered"}


def test_money_is_chip_hours_times_price():
    """Fails when 704 chips for ten days are not 168,960 chip-hours, or power is not the rated one."""
    found = cost.money(marin_535b.run(), 10.0, 2.5)
    assert found["chip_hours"] == 704 * 240
    assert found["money"] == 2.5 * 704 * 240
    assert found["energy_mwh"] == pytest.approx(704 * 240 * (120e3 / 72) / 1e6)
    assert cost.money(pocket.run(), 1.0, None) == {
        "chip_hours": 24.0,
        "energy_mwh": None,
        "price_per_chip_hour": None,
        "money": None,
    }


START = datetime.date(2026, 8, 20)


def test_slack_counts_from_the_start():
    """Fails when a date and the same number of days disagree, or a missed deadline looks met."""
    by_days, by_date = cost.slack(98.0, 100, START), cost.slack(98.0, "2026-11-28", START)
    assert by_days == by_date == {"deadline_days": 100.0, "slack_days": 2.0, "met": True}
    late = cost.slack(98.0, 90.5, START)
    assert late is not None and late["slack_days"] == -7.5 and not late["met"]
    assert cost.slack(98.0, None, START) is None
    assert cost.end_date(START, 99.2) == "2026-11-28"
    assert cost.end_date(START, 1e9) is None


@pytest.mark.parametrize("deadline", ["soon", "2026-13-01", -3, 0, "2026-08-01", float("nan")])
def test_bad_deadlines_are_refused(deadline):
    """Fails when a deadline that is no day after the start is taken."""
    with pytest.raises(ValueError, match="deadline"):
        cost.slack(10.0, deadline, START)


@pytest.mark.parametrize("goodput", [0.0, -0.5, 1.2, float("nan")])
def test_bad_goodput_is_refused(goodput):
    """Fails when a share outside 0 to 1 is taken."""
    with pytest.raises(ValueError, match="goodput"):
        cost.time(pocket.run(), goodput)


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_bad_price_is_refused(price):
    """Fails when a price that is no price is multiplied."""
    with pytest.raises(ValueError, match="price"):
        cost.money(pocket.run(), 1.0, price)


def test_an_unknown_chip_names_the_nearest():
    """Fails when a mistyped chip is not answered with three names."""
    with pytest.raises(ValueError, match="unknown chip 'h1000'; nearest: h100, h200, a100"):
        hardware.chip("h1000")


def test_every_chip_has_its_source_and_sane_rates():
    """Fails when a row of the table lacks a source or swaps a rate: memory is faster than links, links than the network."""
    for c in hardware.CHIPS.values():
        assert c.source and c.label
        assert c.bf16_flops_per_s >= 0.9 * c.fp32_flops_per_s
        assert c.memory_bytes_per_s >= c.scale_up_bytes_per_s >= c.scale_out_bytes_per_s > 0
        assert c.watts is None or 500 < c.watts < 3000
