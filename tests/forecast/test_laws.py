"""The laws against formulas: fails when a known law is not found again, when a forecast depends on what it must not depend on, or
when bands do not hold what they promise."""

import csv
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate

from argosy.forecast import fit, joint, least, per_fraction, schedule, surface
from argosy.forecast import points as P

TABLES = Path(os.environ.get("ARGOSY_FORECAST_TABLES", ""))
public = pytest.mark.skipif(not os.environ.get("ARGOSY_FORECAST_TABLES"), reason="ARGOSY_FORECAST_TABLES is not set")
SIZES = {"a": (1e8, 8000), "b": (3e8, 10000), "c": (9e8, 12000), "d": (2.5e9, 15000)}
HERO = (3e10, 60000)


def law(n: float, tokens: float, step: float, g: float) -> float:
    """A member of the law's family, written out."""
    r = 0.8 * (n / 3e8) ** -0.2 + 0.5 * (tokens / 1e11) ** -0.22 + 0.08 * (step / 1000) ** -1.0
    return 1.5 + r - 0.15 * r**0.6 * g**1.2


def run(
    name: str, n: float, steps: int, rng: np.random.Generator | None = None, count: int = 20, metric: str = "loss"
) -> list[dict]:
    offset = 0.0 if rng is None else 0.001 * rng.normal()
    out = []
    for k in range(1, count + 1):
        step = round(steps * k / count)
        g = step / steps
        noise = 0.0 if rng is None else 0.0015 * rng.normal()
        value = law(n, 300 * n * g, step, g) * math.exp(offset + noise)
        row = {"run": name, "metric": metric, "step": step, "steps_total": steps, "tokens": 300 * n * g, "active_params": n}
        out.append(row | {"flops": 1800 * n * n * g, "value": value})
    return out


def ladder(rng: np.random.Generator | None = None) -> tuple[list[dict], list[dict]]:
    points = [row for name, size in SIZES.items() for row in run(name, *size, rng)]
    return points, run("hero", *HERO, rng)


def forecast(points: list[dict], target: list[dict], **more) -> dict:
    bare = [{k: v for k, v in row.items() if k != "value"} for row in target]
    return fit.fit(P.of_rows(points), P.of_rows(bare, "TARGET"), **more)


def column(body: dict, name: str) -> np.ndarray:
    return np.array([row[name] for row in body["rows"]])


def test_a_known_law_is_found_again():
    """Within 1% at 140 times the FLOPs, and inside the 90% band, from noiseless rungs."""
    points, target = ladder()
    body, actual = forecast(points, target), np.array([r["value"] for r in target])
    assert np.abs(column(body, "mean") / actual - 1).max() < 0.01
    assert ((column(body, "lo90") < actual) & (actual < column(body, "hi90"))).all()
    assert body["fit"]["noise"]["loss"] == joint.NOISE_LEAST
    assert abs(body["fit"]["parameters"]["loss"]["E"] - 1.5) < 0.25


def test_order_of_rows_and_unit_of_tokens_do_not_matter():
    points, target = ladder(np.random.default_rng(0))
    plain = column(forecast(points, target), "mean")
    order = np.random.default_rng(1).permutation(len(points))
    np.testing.assert_allclose(column(forecast([points[i] for i in order], target), "mean"), plain, rtol=1e-4)
    scaled = [[row | {"tokens": row["tokens"] / 1e9} for row in rows] for rows in (points, target)]
    np.testing.assert_allclose(column(forecast(*scaled), "mean"), plain, rtol=1e-4)
    back = forecast(points, target[::-1])
    np.testing.assert_allclose(column(back, "mean")[::-1], plain, rtol=1e-4)


def test_the_same_tables_give_the_same_answer():
    points, target = ladder(np.random.default_rng(0))
    assert forecast(points, target) == forecast(points, target)


@pytest.mark.parametrize("seed", range(3))
def test_forecasts_fall_with_progress_and_bands_are_nested(seed):
    points, target = ladder(np.random.default_rng(seed))
    body = forecast(points, target)
    names = ("lo90", "lo50", "mean", "hi50", "hi90")
    columns = {name: column(body, name) for name in names}
    for name in names:
        assert (np.diff(columns[name]) < 0).all(), name
    for a, b in itertools.pairwise(names):
        assert (columns[a] < columns[b]).all(), (a, b)


def test_bands_hold_what_they_promise():
    """Eight noisy ladders from the law's family: at least 80% of the heroes' rows within 90%, and the bands say something."""
    inside, width = [], []
    for seed in range(8):
        points, target = ladder(np.random.default_rng(seed))
        body, actual = forecast(points, target), np.array([r["value"] for r in target])
        inside.append(((column(body, "lo90") <= actual) & (actual <= column(body, "hi90"))).mean())
        width.append(((column(body, "hi90") - column(body, "lo90")) / actual).mean())
    assert np.mean(inside) >= 0.8
    assert np.mean(width) < 0.06


def test_isoflop_tables_without_steps():
    """One row per model on a Chinchilla surface; 4 times beyond, within half a percent."""
    surface_ = lambda n, c: 1.8 + 480 * n**-0.35 + 2000 * (c / (6 * n)) ** -0.366  # noqa: E731
    rows = []
    for i, c in enumerate((1e19, 3e19, 1e20, 3e20, 1.2e21)):
        for k, n in enumerate(np.geomspace(0.3, 3, 7) * math.sqrt(c / 120)):
            rows.append({"run": f"m{i}{k}", "metric": "loss", "active_params": n, "flops": c, "value": surface_(n, c)})
    points, target = rows[:28], rows[28:]
    body = forecast(points, target)
    assert np.abs(column(body, "mean") / [r["value"] for r in target] - 1).max() < 0.005
    assert body["rows"][0]["step"] is None and body["rows"][0]["tokens"] is None


def test_parameters_that_are_not_active_count_where_sparsity_differs():
    """Models with 2 and 8 times their active parameters say what 32 times are worth, on a formula with N = active^0.7 total^0.3."""
    rows = []
    for active in (5e7, 1e8, 2e8, 4e8):
        for ratio, each in itertools.product((2, 8, 32), (20, 100)):
            value = 1.8 + 480 * (active * ratio**0.3) ** -0.35 + 2000 * (each * active) ** -0.366
            row = {"run": f"{active:g}-{ratio}-{each}", "metric": "loss", "active_params": active, "tokens": each * active}
            rows.append(row | {"total_params": ratio * active, "value": value})
    points, target = [[r for r in rows if (r["total_params"] > 30 * r["active_params"]) == far] for far in (False, True)]
    body = forecast(points, target)
    assert np.abs(column(body, "mean") / [r["value"] for r in target] - 1).max() < 0.01
    assert abs(body["fit"]["parameters"]["loss"]["tau"] - 0.3) < 0.1


def test_one_size_says_what_another_is_worth_within_its_band():
    """From one size at five lengths to three times the size on a published surface (2404.10102): within 3%, where the band says so."""
    surface_ = lambda n, d: 1.8172 + 482.01 * n**-0.3478 + 2085.43 * d**-0.3658  # noqa: E731
    row = lambda n, d: {"run": f"{n:g}-{d:g}", "metric": "loss", "active_params": n, "tokens": d, "value": surface_(n, d)}  # noqa: E731
    body = forecast([row(2e8, 2e8 * r) for r in (10, 20, 40, 100, 200)], [row(6e8, 6e8 * r) for r in (20, 100)])
    actual = [surface_(6e8, 6e8 * r) for r in (20, 100)]
    assert np.abs(column(body, "mean") / actual - 1).max() < 0.03
    assert ((column(body, "lo90") < actual) & (column(body, "hi90") > actual)).all()


def test_flops_and_steps_without_tokens_follow_the_flops():
    """Within 1%, though the steps of the rungs say nothing of their sizes."""
    points, target = [[{k: v for k, v in r.items() if k not in ("tokens", "active_params")} for r in rows] for rows in ladder()]
    body, actual = forecast(points, target), np.array([r["value"] for r in target])
    assert np.abs(column(body, "mean") / actual - 1).mean() < 0.01


def test_flops_alone_are_an_envelope():
    rows = [{"run": f"{c:g}", "metric": "loss", "flops": c, "value": 1.5 + 85 * c**-0.088} for c in np.geomspace(1e18, 1e21, 7)]
    far = {"run": "far", "metric": "loss", "flops": 1e23}
    assert abs(forecast(rows, [far])["rows"][0]["mean"] / (1.5 + 85 * 1e23**-0.088) - 1) < 0.01


def cosine(steps: int, upto: int) -> np.ndarray:
    at = np.arange(1, steps + 1)
    return np.where(at <= 100, at / 100, 0.1 + 0.45 * (1 + np.cos(np.pi * np.minimum(at, upto) / upto)))


def curve(name: str, rate: np.ndarray) -> list[dict]:
    """3 + 20 S^-0.5 - 0.12 sum of falls released within 50 updates, by the sum over every update; rows every 100 updates from 500 on."""
    total = np.cumsum(rate)
    fall = -np.diff(rate, prepend=rate[0])
    fall[: int(np.argmax(rate)) + 1] = 0
    out = []
    for t in range(500, len(rate) + 1, 100):
        gain = (fall[:t] * (1 - (1 + (total[t - 1] - total[:t]) / 50) ** -0.6)).sum()
        value = 3 + 20 * total[t - 1] ** -0.5 - 0.12 * gain
        out.append(
            {"run": name, "metric": "loss", "step": t, "steps_total": len(rate), "lr": 3e-4 * rate[t - 1], "value": value}
        )
    return out


@pytest.mark.parametrize("method", ["schedule", "joint"])
def test_curves_under_another_schedule(method):
    """From a cosine, a constant rate and a step down to a cooldown: within 0.15% from update
    1,000 on, and closer at the end than a forecast that is not told the rate."""
    constant = np.minimum(np.arange(1, 4001) / 100, 1.0)
    step = constant.copy()
    step[2000:] = 0.3
    cooldown = constant.copy()
    cooldown[3000:] = np.linspace(1, 0.05, 1000)
    points = curve("cosine", cosine(4000, 4000)) + curve("constant", constant) + curve("step", step)
    target = curve("cooldown", cooldown)
    body, actual = forecast(points, target, method=method), np.array([r["value"] for r in target])
    assert np.abs(column(body, "mean") / actual - 1)[5:].max() < 0.0015
    no_rate = forecast(*([{k: v for k, v in row.items() if k != "lr"} for row in rows] for rows in (points, target)))
    assert abs(column(no_rate, "mean")[-1] / actual[-1] - 1) > abs(column(body, "mean")[-1] / actual[-1] - 1)


def test_the_schedule_method_needs_rates():
    with pytest.raises(ValueError, match="learning rate of every run"):
        forecast(*ladder(), method="schedule")


def test_area_under_a_path_is_its_integral():
    path = P.Rates(np.array([0.0, 7.0, 20.0, 50.0]), np.array([0.0, 4.0, 3.0, 1.0]))
    known = schedule.area(path)
    for t in (3.0, 7.0, 13.3, 50.0):
        exact = integrate.quad(lambda u: np.interp(u, path.step, path.lr) / 4, 0, t, points=[7, 20], limit=200)[0]
        assert abs(schedule.effective(known, np.array([t]))[0] - exact) < 1e-9


def test_other_metrics_follow_their_trend():
    """Gradient norm that halves per decade of FLOPs; drops with zeros stay above 0."""
    rng, rows = np.random.default_rng(0), []
    for name, size in {**SIZES, "hero": HERO}.items():
        for row in run(name, *size):
            g = row["step"] / row["steps_total"]
            full = math.log10(row["flops"] / g)
            norm = 10 * 2 ** -(full - 19) * (1 + 0.3 * g) * math.exp(0.02 * rng.normal())
            rows += [
                row | {"metric": "grad/norm/total", "value": norm},
                row | {"metric": "moe/drop_fraction", "value": max(0.0, 0.04 * g - 0.01)},
            ]
    points, target = [r for r in rows if r["run"] != "hero"], [r for r in rows if r["run"] == "hero"]
    body, actual = forecast(points, target), np.array([r["value"] for r in target])
    norm = np.array([r["metric"].startswith("grad") for r in target])
    assert np.abs(np.log(column(body, "mean")[norm] / actual[norm])).max() < 0.3
    assert ((column(body, "lo90") <= actual) & (actual <= column(body, "hi90")))[norm].mean() > 0.9
    assert (column(body, "lo90")[~norm] >= 0).all()
    assert np.abs(column(body, "mean") - actual)[~norm].max() < 0.015


def test_accuracy_comes_from_loss_by_a_sigmoid():
    rows = []
    for name, size in {**SIZES, "hero": HERO}.items():
        for row in run(name, *size):
            rows += [row, row | {"metric": "task/acc", "value": 0.25 + 0.75 / (1 + math.exp(4 * (row["value"] - 2.6)))}]
    points = [r for r in rows if r["run"] != "hero"]
    target = [r for r in rows if r["run"] == "hero" and r["metric"] == "task/acc"]
    body, actual = forecast(points, target), np.array([r["value"] for r in target])
    assert np.abs(column(body, "mean") - actual).max() < 0.03
    assert ((column(body, "lo90") <= actual) & (actual <= column(body, "hi90"))).all()
    alone = [r for r in points if r["metric"] == "task/acc"]
    with pytest.raises(ValueError, match="from a loss"):
        forecast(alone, target)


def test_batch_of_least_squares_agrees_with_one_by_one():
    """A line with an offset on half of its rows, linear parameters eliminated or not: the gradient is zero at the answer, in both alike."""
    x = np.linspace(0, 1, 9)
    y = np.stack([0.1 + 0.2 * x, -0.3 * x])
    y[:, 5:] += 0.4
    own = np.stack([x < 0.3, x > 0.55]).astype(float)
    design = np.concatenate([np.ones((1, 9)), x[None], own])
    plain = lambda t, r: t @ design  # noqa: E731
    found = [
        least.solve(plain, y, np.ones((1, 9)), np.zeros((1, 4)), np.zeros((2, 4)), fixed)[0]
        for fixed in (np.zeros((0, 9)), own)
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    for theta in found:
        rest = y - theta @ design
        np.testing.assert_allclose((least.influence(rest) * rest) @ design.T - theta, 0, atol=1e-4)


def test_many_long_curves_are_thinned():
    """120 runs of 60 rows: no more than ten rows of each are fitted, the ends among them, and the law is found within 1%."""
    sizes = np.geomspace(1e8, 3e9, 120)
    points = [row for k, n in enumerate(sizes) for row in run(f"r{k}", float(n), 10000, count=60)]
    rows = joint.chosen(P.of_rows(points))
    assert len(rows) == 1200 and set(range(59, 7200, 60)) <= set(rows.tolist())
    target = run("hero", *HERO)
    assert np.abs(column(forecast(points, target), "mean") / [r["value"] for r in target] - 1).max() < 0.01


def test_law_is_written_as_documented():
    """`surface.log_loss` against its formula with numbers of its own."""
    points, target = ladder()
    table = P.of_rows(points)
    s = surface.setting(table, P.of_rows(target, "TARGET"), {}, True)
    theta = np.random.default_rng(0).normal(size=(1, len(s.names))) * 0.3
    v = surface.named(s, theta[0])
    cells = P.derived(table)
    n, d = cells["N"] / np.exp(np.log(cells["N"]).mean()), cells["D"] / np.exp(np.log(cells["D"]).mean())
    r = v["A"] * n ** -v["a"] + v["B"] * d ** -v["b"] + v["G"] * (cells["s"] / 1000) ** -v["c"]
    r0 = 0.4 * np.exp(np.log(table.value).mean())
    loss = v["E"] + r - v["K"] * (r / r0) ** v["kappa"] * cells["g"] ** (1 + v["q"])
    np.testing.assert_allclose(np.exp(surface.log_loss(s, theta, np.zeros(1, int), s.points)[0]), loss, rtol=1e-12)


def test_per_fraction_is_one_line_per_fraction():
    """On L = 1.5 + A C^-a with its own A and a at each fraction the method is exact; the tail rule is a line."""
    rows = []
    for name, (n, steps) in {**SIZES, "hero": HERO}.items():
        for k in range(1, 21):
            c = 1e18 * (n / 1e8) ** 2 * k / 20
            value = 1.5 + (60 + k) * c ** -(0.08 + 0.0005 * k)
            row = {"run": name, "metric": "loss", "step": steps * k / 20, "steps_total": steps, "flops": c, "value": value}
            rows.append(row)
    points, target = [r for r in rows if r["run"] != "hero"], [r for r in rows if r["run"] == "hero"]
    body = forecast(points, target, method="per_fraction")
    np.testing.assert_allclose(column(body, "mean"), [r["value"] for r in target], rtol=1e-9)
    body = forecast([r for r in points if not (r["run"] == "d" and r["step"] > 12000)], target, method="per_fraction")
    about = body["fit"]["parameters"]["loss"]
    ends = [[r["value"] for r in points if r["run"] == name] for name in "abc"]
    errors = [v[19] - np.polyval(np.polyfit(np.arange(12, 17), v[11:16], 1), 20) for v in ends]
    assert (
        about["tail_correction"] == pytest.approx(np.mean(errors)) and "mean error at 100%" in about["tail_correction_source"]
    )


def test_per_fraction_refuses_what_it_was_not_made_for():
    points, target = ladder()
    with pytest.raises(ValueError, match=r"1\.5 nats"):
        forecast([r | {"value": r["value"] - 1} for r in points], target, method="per_fraction")
    with pytest.raises(ValueError, match="tail-correction belongs"):
        forecast(points, target, tail_correction=0.1)
    for value in (float("nan"), float("inf"), -5.0):
        with pytest.raises(ValueError, match="between -1 and 1"):
            forecast(points, target, method="per_fraction", tail_correction=value)
    with pytest.raises(ValueError, match="nearest legal joint"):
        forecast(points, target, method="magic")


def reference() -> tuple[P.Table, float]:
    with (TABLES / "marin_ladder/ladder_eval.csv").open() as handle:
        rows = [
            {
                "run": r["rung"],
                "metric": "loss",
                "step": int(r["step"]) + 1,
                "steps_total": r["steps_total"],
                "tokens": r["tokens"],
            }
            | {
                "active_params": r["active_params"],
                "flops": r["compute_flops_no_lm_head"],
                "value": r["dropless_paloma_macro_loss"],
            }
            for r in csv.DictReader(handle)
        ]
    return P.of_rows(rows), 6.690294608796058e18 * 390_251


@public
def test_the_published_forecast_to_the_digit():
    """All twenty values of the reference run's registered forecast (marin#8435)."""
    published = "2.3921 2.3261 2.2872 2.2571 2.2402 2.2234 2.2142 2.1853 2.1918 2.1724 2.1491 2.1352 2.1237 2.1105 2.0971 2.0852 2.0775 2.0643 2.0505 2.0388"
    points, whole = reference()
    found = per_fraction.curve(points, whole, 0.005)
    assert [f"{x:.4f}" for x in found.mean] == published.split()
    assert abs(found.mean[-1] - 2.03878459867) < 5e-12
    assert (found.scale[-1], found.exponent[-1]) == (pytest.approx(84.79, abs=0.01), pytest.approx(0.08998, abs=1e-5))
    own = per_fraction.curve(points, whole)
    assert own.tail.rungs == ("d2048",) and abs(own.tail.correction - 0.0032) < 5e-5 and abs(own.mean[-1] - 2.03714) < 2e-5


@public
def test_hold_out_of_the_reference_ladder():
    """The d2048 rung from the three below it: no worse than the reference method's own 0.35%, and within the band."""
    points, _ = reference()
    top = np.array([r == "d2048" for r in points.run])
    target = P.take(points, top)
    body = fit.fit(P.take(points, ~top), dataclasses.replace(target, value=np.full(len(target), math.nan)))
    assert np.abs(column(body, "mean") / target.value - 1).mean() <= 0.0035
    assert ((column(body, "lo90") <= target.value) & (target.value <= column(body, "hi90"))).mean() > 0.85


def test_the_command_prints_the_rows_as_json(tmp_path):
    points, target = ladder()
    for name, rows, columns in (("points", points, P.POINTS_COLUMNS), ("target", target, P.TARGET_COLUMNS)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as handle:
            writer = csv.DictWriter(handle, columns, extrasaction="ignore", restval="")
            writer.writeheader()
            writer.writerows(rows)
    files = ["--points", str(tmp_path / "points.csv"), "--target", str(tmp_path / "target.csv")]
    command = "import sys; from argosy import cli; cli.main(sys.argv[1:]); assert 'jax' not in sys.modules"
    found = subprocess.run(
        [sys.executable, "-c", command, "forecast", "fit", *files, "--json"], capture_output=True, text=True, check=True
    )
    body = json.loads(found.stdout)
    assert list(body) == ["rows", "fit"] and list(body["fit"]) == ["method", "parameters", "noise", "alarms"]
    assert list(body["rows"][0]) == ["run", "metric", "step", "tokens", "mean", "lo50", "hi50", "lo90", "hi90"]
    assert [r["step"] for r in body["rows"]] == [r["step"] for r in target]
    wrong = [*files, "--method", "magic"]
    found = subprocess.run(
        [sys.executable, "-m", "argosy.cli", "forecast", "fit", *wrong], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2 and found.stderr.startswith("argosy: --method 'magic'") and not found.stdout
