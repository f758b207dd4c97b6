"""Diagnosis: one planted fault of each kind is found and named; an undisturbed run departs from nothing."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from argosy import cli, spec
from argosy.judge import departures as D
from argosy.judge import diagnose as G
from argosy.judge import ladders, points, register
from argosy.runs import pocket
from argosy.track import store

AT = 0.4  # of the run: where faults begin
COMMON, ALONE = 0.01, {"eval_": 0.002, "train/router/": 0.02, "train/": 0.004}  # of log: what the forecast says of itself
HERO = pocket.run()
FAULT_STEP = round(AT * spec.steps(HERO))  # the last update of the first attempt, whole like those before it


@dataclass(frozen=True)
class Truth:
    """The law without noise, at the hero's evaluations."""

    rows: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Rows `metric, step, mean` of every forecast metric: an independent reading of the law, not of the code under test."""
    patch = pytest.MonkeyPatch()
    for name in ("NOISE", "OFFSET", "ROUGH"):
        patch.setattr(synthetic, name, 0.0)
    out = []
    steps = points.evaluation_steps(HERO)
    logged = sorted({*steps, *(max(1, round(spec.steps(HERO) * k / 100)) for k in range(101))})  # as `synthetic.sail` does
    for step, before in zip(steps, [0, *steps], strict=False):
        rows = [synthetic.update(HERO, "hero", s, 0) for s in logged if before < s <= step]
        means = {m: float(np.mean([r[m] for r in rows])) for m in rows[0]} | synthetic.evaluation(HERO, "hero", step, 0)
        out += [{"metric": m, "step": step, "mean": means[m]} for m in points.forecastable(sorted(means)) if means[m] > 0]
    patch.undo()
    return Truth(sorted(out, key=lambda r: (r["metric"], r["step"])))


def registered(home: Path, truth: Truth) -> None:
    """A registered forecast whose means are the law's, with a common error of 1% and the noise of a row."""
    rows, covariance = [], {}
    for metric in dict.fromkeys(r["metric"] for r in truth.rows):
        own = [r for r in truth.rows if r["metric"] == metric]
        noise = next((s for start, s in ALONE.items() if metric.startswith(start)), 0.02)
        covariance[metric] = {
            "rows": list(range(len(rows), len(rows) + len(own))),
            "matrix": np.full((len(own), len(own)), COMMON**2).tolist(),
            "noise": noise,
            "zero": 0.0,
        }
        spread = math.sqrt(COMMON**2 + noise**2)
        for r in own:
            bands = {f"{side}{level}": r["mean"] * math.exp(s * z * spread) for side, s in (("lo", -1), ("hi", 1)) for level, z in ((50, 0.674), (90, 1.645))}  # fmt: skip
            rows.append({"run": "hero", "tokens": 1, **r, **bands})
    body = {
        "created": "2026-11-29T00:00:00+00:00", "created_s": 0.0, "late": None, "reason": "", "bridge": None,
        "hero": spec.to_json(HERO), "identity": register.identity(HERO, "5f1d77c2"), "ladder": [], "data": {"points": [], "target": []}, "method": "joint", "seed": 0,
        "forecast": {"rows": rows, "fit": {"method": "joint", "parameters": {}, "noise": {}, "alarms": []}, "covariance": covariance},
    }  # fmt: skip
    register.write(home, "hero", body, None)


def shifted(factors: dict[str, float]) -> synthetic.Fault:
    """Metrics, by the start of their names, times a factor from `AT` on."""

    def change(_: str, done: float, row: synthetic.Row) -> synthetic.Row:
        if done * spec.steps(HERO) < FAULT_STEP + 0.5:
            return row
        return {n: v * next((f for start, f in factors.items() if n.startswith(start)), 1.0) for n, v in row.items()}

    return change


LOSSES = ("eval_dropless/", "train/loss", "train/cross_entropy_loss")
FAULTS: dict[str, tuple[synthetic.Fault, str]] = {
    "data": (shifted({"eval_dropless/prose/": 1.02}), "prose"),
    "routing": (
        shifted(
            {"train/router/layer_2/load": 1.5, "train/router/layer_2/drop": 3.0, "moe/": 1.5, **dict.fromkeys(LOSSES, 1.01)}
        ),
        "layer 2",
    ),
    "optimizer": (shifted({"grad/norm/readout": 1.6, "grad/norm/total": 1.3, **dict.fromkeys(LOSSES, 1.01)}), "readout"),
    "implementation": (
        shifted(
            {"grad/norm/": 1.2, "moe/": 1.2, "train/router/layer": 1.05, "throughput/": 0.9, **dict.fromkeys(LOSSES, 1.015)}
        ),
        "code changed",
    ),
}


def sail(home: Path, truth: Truth, fault: synthetic.Fault | None = None, code: str = "aaaa", until: float = 0.8) -> None:
    """The hero in two attempts, the second with `code`, with its forecast."""
    registered(home, truth)
    synthetic.sail(home, "hero", HERO, AT, fault=fault, code={"argosy": "0.1.0", "sources": "aaaa"})
    synthetic.sail(home, "hero", HERO, until, begin=AT, fault=fault, code={"argosy": "0.1.0", "sources": code})


@pytest.mark.parametrize("seed", range(2))
def test_nothing_departs_in_an_undisturbed_run(tmp_path: Path, truth: Truth, seed: int, capsys: pytest.CaptureFixture):
    """Fails when noise alone makes a metric depart, over some forty metrics."""
    registered(tmp_path, truth)
    synthetic.sail(tmp_path, "hero", HERO, 0.8, seed=seed)
    body = G.diagnose(tmp_path, "hero")
    assert not body["departed"] and body["likeliest"] is None and body["branch"] is None
    assert len(body["metrics"]) > 35
    cli.main(["diagnose", "hero", "--home", str(tmp_path)])
    assert "nothing departs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_named(tmp_path: Path, truth: Truth, kind: str):
    """Fails when a fault is put down to another cause, to the wrong set, layer or group, or to the wrong update."""
    fault, what = FAULTS[kind]
    sail(tmp_path, truth, fault, code="bbbb" if kind == "implementation" else "aaaa")
    body = G.diagnose(tmp_path, "hero")
    assert body["likeliest"] == kind, body["why"]
    assert what in body["groups"][0]["signs"][0]
    assert body["ahead"] is None or body["ahead"] > 1.3
    every = spec.steps(HERO) / 20
    assert FAULT_STEP < body["first_step"] <= FAULT_STEP + 2 * every
    assert body["branch"]["cause"] == kind and str(200) in body["branch"]["says"]


def test_the_code_that_changed_is_the_nearest_record(tmp_path: Path, truth: Truth, capsys: pytest.CaptureFixture):
    """Fails when the attempt with another code version before the departure is not told, or JSON is not JSON alone."""
    sail(tmp_path, truth, FAULTS["implementation"][0], code="bbbb")
    with store.open_writer(tmp_path / "runs/hero", round(0.8 * spec.steps(HERO))) as writer:
        writer.event("verdict", FAULT_STEP + 1, verdict="on track")  # what the run was judged is no cause of it
    cli.main(["diagnose", "hero", "--home", str(tmp_path), "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["nearest"]["step"] == FAULT_STEP
    assert "from aaaa to bbbb" in body["nearest"]["says"]


def test_a_change_of_code_without_a_departure_is_nothing(tmp_path: Path, truth: Truth):
    """Fails when a new code version alone is taken for a fault."""
    sail(tmp_path, truth, code="bbbb")
    assert not G.diagnose(tmp_path, "hero")["departed"]


def test_a_learning_rate_off_its_schedule_is_the_optimizer(tmp_path: Path, truth: Truth):
    """Fails when a learning rate that is not the schedule's is passed over."""
    sail(tmp_path, truth, shifted({"optim/learning_rate": 0.5, **dict.fromkeys(LOSSES, 1.01)}))
    body = G.diagnose(tmp_path, "hero")
    assert body["likeliest"] == "optimizer"
    assert "where the schedule has" in body["groups"][0]["signs"][0]


def test_losses_alone(tmp_path: Path, truth: Truth):
    """Fails when losses that move together with routing and optimizer quiet, or evaluations alone, are not the implementation's."""
    sail(tmp_path / "all", truth, shifted(dict.fromkeys(LOSSES, 1.015)))
    body = G.diagnose(tmp_path / "all", "hero")
    assert body["likeliest"] == "implementation"
    assert "routing and optimizer quiet" in body["groups"][0]["signs"][0]
    sail(tmp_path / "evaluation", truth, shifted({"eval_dropless/": 1.015}))
    body = G.diagnose(tmp_path / "evaluation", "hero")
    assert body["likeliest"] == "implementation"
    assert "not the training loss" in body["groups"][0]["signs"][0]


def test_a_parameter_norm_that_leaves_the_ladder(tmp_path: Path, truth: Truth):
    """Fails when a group's parameters that grow in the hero as they grew on no rung are passed over, or equal growth is taken for one."""

    def grow(hero: float) -> synthetic.Fault:
        def change(name: str, done: float, row: synthetic.Row) -> synthetic.Row:
            late = max(done - AT, 0.0) if name == "hero" else 0.0
            gate = 8.0 * max(done, 1e-3) ** 0.2 * math.exp(hero * late)
            return row | ({"params/norm/head_gate": gate, "params/norm/routed": 31.5} if "train/loss" in row else {})

        return change

    rungs = [rung for rung in pocket.rungs() if rung.purpose == "size"]
    for home, hero in ((tmp_path / "same", 0.0), (tmp_path / "more", 1.0)):
        ladders.save(home, "hero", HERO, rungs)
        for rung in rungs:
            synthetic.sail(home, f"hero-{rung.name}", rung.run, fault=grow(0.0))
        sail(home, truth, grow(hero))
    assert not G.diagnose(tmp_path / "same", "hero")["departed"]
    body = G.diagnose(tmp_path / "more", "hero")
    assert body["likeliest"] == "optimizer"
    assert body["groups"][0]["signs"][0].startswith("norm of head_gate")


def test_values_that_are_no_numbers_are_the_implementation(tmp_path: Path, truth: Truth):
    """Fails when NaN losses are skipped as if they had not been logged."""
    sail(tmp_path, truth, shifted({"train/loss": math.nan}))
    body = G.diagnose(tmp_path, "hero")
    assert body["likeliest"] == "implementation"
    assert "no number" in body["groups"][0]["signs"][0]


def test_too_early_and_not_registered(tmp_path: Path, truth: Truth, capsys: pytest.CaptureFixture):
    """Fails when two evaluations are judged, or a hero without a forecast gives a traceback."""
    synthetic.sail(tmp_path, "hero", HERO, 0.12)
    with pytest.raises(SystemExit) as status:
        cli.main(["diagnose", "hero", "--home", str(tmp_path)])
    assert status.value.code == 2
    assert "argosy forecast register hero" in capsys.readouterr().err
    registered(tmp_path, truth)
    body = G.diagnose(tmp_path, "hero")
    assert not body["departed"]
    assert "too early" in body["why"]


def of(change: Callable[[np.ndarray], np.ndarray], noise: float, matrix: float, seed: int) -> D.Residual:
    steps = np.arange(1, 21) * 50
    values = np.random.default_rng(seed).normal(size=20) * noise + change(steps)
    return D.Residual("x", steps, values, np.full((20, 20), matrix**2), np.full(20, noise), values)


@pytest.mark.parametrize("at", [4, 10, 16])
def test_a_step_is_dated_and_measured(at: int):
    """Fails when a known step's row, size or standard error comes out wrong beside plain algebra, or a common offset counts."""
    size, noise = 0.05, 0.005
    r = of(lambda s: 0.02 + size * (np.arange(20) >= at), noise, 0.1, seed=at)
    d = D.departure(r)
    assert d.since == r.steps[at] and d.before == r.steps[at - 1]
    assert abs(d.change - size) < 4 * noise * math.sqrt(1 / at + 1 / (20 - at))
    # With a free common offset the step's variance is noise^2 (1/n1 + 1/n2).
    free = (r.values[at:].mean() - r.values[:at].mean()) / (noise * math.sqrt(1 / at + 1 / (20 - at)))
    assert math.isclose(d.sigmas, free, rel_tol=0.02)


def test_changes_of_noise_alone_stay_below_the_limit():
    """Fails when more than one in a hundred residuals of Gaussian noise departs."""
    found = [abs(D.departure(of(lambda s: 0.0 * s, 0.01, 0.03, seed)).sigmas) for seed in range(400)]
    assert np.mean(np.array(found) >= D.SURE) < 0.01


def test_a_change_within_a_wide_band_is_told_and_no_departure(tmp_path: Path, truth: Truth, monkeypatch: pytest.MonkeyPatch):
    """Fails when a gradient that moves for sure inside a band of a few runs is called a fault, or a loss that does so is not."""
    bands = register.write

    def wide(home: Path, name: str, body: dict[str, Any], before: None) -> Any:
        for r in body["forecast"]["rows"]:
            r |= {key: r["mean"] * (r[key] / r["mean"]) ** 20 for key in ("lo50", "hi50", "lo90", "hi90")}
        return bands(home, name, body, before)

    monkeypatch.setattr(register, "write", wide)
    sail(tmp_path / "gradient", truth, shifted({"grad/norm/readout": 1.6}))
    body = G.diagnose(tmp_path / "gradient", "hero")
    assert (body["departed"], body["likeliest"], body["branch"], body["first_step"]) == (False, None, None, None)
    assert "nothing departs for sure" in body["why"]
    assert "within its band grad/norm/readout moved most, by +60" in body["why"]
    assert abs(body["metrics"][0]["sigmas"]) > 20 and not body["metrics"][0]["departed"]
    sail(tmp_path / "data", truth, FAULTS["data"][0])
    body = G.diagnose(tmp_path / "data", "hero")
    assert not any(m["widths_out"] for m in body["metrics"]) and body["likeliest"] == "data"
