"""The plan as one dict: its keys, the figures that the reference run is known by, and that it is plain JSON."""

import datetime
import json
import subprocess
import sys

import pytest

from argosy import spec
from argosy.plan.sheet import plan
from argosy.runs import RECIPES, marin_535b, pocket

START = datetime.date(2026, 8, 20)


@pytest.fixture(scope="module")
def hero():
    return plan(marin_535b.run(), price=3.0, deadline=100, start=START)


def test_the_keys_that_tools_read(hero):
    """Fails when a key of the documented JSON is renamed or lost."""
    assert {"total", "active", "by_kind"} <= set(hero["params"])
    assert {"train_step", "train_step_no_head", "train_total"} <= set(hero["flops"])
    assert {"per_step", "horizon", "mixture_reference", "phases"} <= set(hero["tokens"])
    assert all({"name", "tokens", "seq_len", "weights"} <= set(p) for p in hero["tokens"]["phases"])
    assert {"muonh_lr", "adam_lr", "beta2", "eps", "warmup_steps"} <= set(hero["optim"])
    assert {"device", "host"} == set(hero["memory"]["per_device_bytes"])
    assert {"floor_step_s", "step_s", "days"} <= set(hero["time"])
    assert {"chip", "chips", "mesh"} <= set(hero["hardware"])


def test_the_reference_run_exactly(hero):
    """Fails when a figure of the published run is off in any printed digit."""
    assert hero["params"]["total"] == sum(hero["params"]["by_kind"].values()) == 535_477_106_688
    assert hero["params"]["active"] == 22_762_487_808
    assert f"{hero['flops']['train_step']:.12e}" == "6.908433317700e+18"
    assert f"{hero['flops']['train_step_no_head']:.12e}" == "6.690294608796e+18"
    assert f"{hero['flops']['train_total']:.3e}" == "2.696e+24"
    assert hero["steps"] == 390_251
    assert hero["tokens"]["per_step"] == 46_137_344
    rates = hero["optim"]
    assert f"{rates['muonh_lr']:.5g} {rates['adam_lr']:.5g} {rates['eps']:.5g}" == "0.0032905 0.00075934 6.0446e-15"
    assert (rates["beta2"], rates["warmup_steps"]) == (0.95, 3_902)
    assert hero["hardware"] | {"source": "", "label": ""} == {
        "chip": "gb200", "label": "", "chips": 704, "flops_per_s": 2.5e15, "source": "",
        "mesh": {"replica": 11, "data": 1, "context": 1, "expert": 64},
    }  # fmt: skip


def test_circulating_figures_are_told_apart(hero):
    """Fails when 18.0T, 18.005T, 15T + 3.75T and 18.75T, or 535.3B and 535.48B, cannot be found side by side."""
    tokens = {row["name"]: (row["tokens"], row["steps"]) for row in hero["tokens"]["accounting"]}
    assert tokens["spoken"] == (18_000_000_000_000, 390_139)
    assert tokens["horizon"] == (791 * 22_762_487_808, 390_251)
    assert tokens["trained"] == (390_251 * 46_137_344, 390_251)
    assert tokens["mixture reference"] == (18_750_000_000_000, None)
    assert (tokens["reference, main"][0], tokens["reference, cooldown"][0]) == (15_000_000_000_000, 3_750_000_000_000)
    assert tokens["phase main"][1] == 312_192
    assert [round(tokens[f"phase {name}"][0] / 1e12, 2) for name in ("main", "cooldown")] == [14.40, 3.60]
    params = {row["name"]: row["params"] for row in hero["params"]["accounting"]}
    assert params["total"] - params["without block gates"] == 150_994_944
    assert f"{params['without block gates'] / 1e9:.1f}" == "535.3"
    horizon = next(row for row in hero["tokens"]["accounting"] if row["name"] == "horizon")
    assert "791.0 per active" in horizon["meaning"] and "764.5 with the readout" in horizon["meaning"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_gives_plain_consistent_json(name):
    """Fails when a plan is not JSON, its phases do not cover the run, or its weights do not sum to 1."""
    found = plan(RECIPES[name](), start=START)
    assert json.loads(json.dumps(found, allow_nan=False)) == json.loads(json.dumps(found))
    phases = found["tokens"]["phases"]
    assert sum(p["steps"] for p in phases) == found["steps"]
    assert sum(p["tokens"] for p in phases) == found["tokens"]["trained"]
    assert all(sum(p["weights"].values()) == pytest.approx(1.0) for p in phases)
    assert abs(found["tokens"]["trained"] - found["tokens"]["horizon"]) <= found["tokens"]["per_step"] / 2


def test_rungs_simulate_epochs_and_the_hero_does_not(hero):
    """Fails when a rung reads its sources whole, or the hero does not (reference_run 6)."""
    assert hero["tokens"]["epoching"] == "plain"
    rung = plan(marin_535b.rung(768), start=START)
    row = next(r for r in rung["tokens"]["accounting"] if r["name"] == "simulated epoching")
    assert row["meaning"].startswith(f"each source is cut to {47_899_213_824 / 18.75e12:.3%}")


def test_money_and_deadline(hero):
    """Fails when the verdict of a deadline does not follow from the planned days."""
    assert hero["cost"]["money"] == pytest.approx(3.0 * 704 * 24 * hero["time"]["days"])
    assert hero["cost"]["deadline"]["slack_days"] == pytest.approx(100 - hero["time"]["days"])
    assert hero["time"]["end"] == "2026-11-27"
    assert plan(pocket.run())["cost"]["deadline"] is None


def test_warnings_name_what_does_not_fit():
    """Fails when a run that cannot fit is planned without a word."""
    run = spec.override(marin_535b.run(), ["compute.chip=h100"])
    found = plan(run, start=START)
    assert not found["memory"]["fits"]
    assert any(w["about"] == "memory" and "GiB" in w["text"] for w in found["warnings"])
    assert any("scale-up domain" in w["text"] for w in found["warnings"])


def test_adamw_shows_its_own_rate():
    """Fails when a plan under AdamW hides the rate that is used."""
    run = spec.override(pocket.run(), ["optim.rule=adamw"])
    assert plan(run)["optim"]["adamw_lr"] == run.optim.adamw_lr


def test_planning_never_loads_jax():
    """Fails when planning or proposing imports JAX: it would take seconds to start."""
    code = "import sys, argosy.plan.report, argosy.runs.propose, argosy.plan.sheet; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
