"""Fails when a table that makes no sense is taken silently, or a message does not say what and where."""

import math

import numpy as np
import pytest

from argosy.forecast import alarms, consistent, fit
from argosy.forecast import points as P

METRIC = "eval_dropless/paloma/macro/loss"


def rung(name: str, params: float, count: int = 20, steps: int = 1000, metric: str = METRIC) -> list[dict]:
    """A finished run on 1.5 + (3e8 / N)^0.2 + (1e10 / D)^0.2, batch growing with size."""
    out = []
    for k in range(1, count + 1):
        step = steps * k // count
        tokens = 100 * params * step / steps
        value = 1.5 + (3e8 / params) ** 0.2 + (1e10 / tokens) ** 0.2
        out.append(
            {
                "run": name,
                "metric": metric,
                "step": step,
                "steps_total": steps,
                "tokens": tokens,
                "tokens_per_step": tokens / step,
            }
            | {"active_params": params, "total_params": 10 * params, "flops": 6 * params * tokens, "value": value}
        )
    return out


def ladder() -> list[dict]:
    return rung("a", 1e8) + rung("b", 3e8) + rung("c", 9e8)


def hero(metric: str = METRIC, params: float = 2e10) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "value"} for row in rung("hero", params, count=5, metric=metric)]


def forecast(points: list[dict], target: list[dict], **more) -> dict:
    return fit.fit(P.of_rows(points), P.of_rows(target, "TARGET"), **more)


def changed(row: int, **cells) -> list[dict]:
    rows = ladder()
    rows[row] |= cells
    return rows


@pytest.mark.parametrize(
    ("points", "target", "says"),
    [
        ([], hero(), "POINTS has no rows"),
        (ladder(), [], "TARGET has no rows"),
        (ladder()[:2], hero(), "2 points are too few"),
        (changed(3, value=math.nan), hero(), r"row 4 .*empty or NaN"),
        (changed(3, value=-1.0), hero(), r"row 4 .*not positive"),
        (changed(3, value=0.0), hero(), r"row 4 .*not positive"),
        (changed(3, value="x"), hero(), r"row 4 .*must be a number"),
        (changed(3, tokens="inf"), hero(), r"row 4.*left empty"),
        (changed(3, active_params=-5), hero(), r"row 4 .*active_params is -5"),
        (changed(0, tokens=0), hero(), r"row 1 .*tokens is 0 after 50 updates"),
        (changed(3, tokens=1e80), hero(), r"row 4 .*tokens is 1e\+80; a quantity is between"),
        (
            changed(3, active_params=2e8),
            hero(),
            "POINTS a: active_params goes from 100000000 at step 150 to 200000000 at step 200; .*one size",
        ),
        (
            ladder(),
            [row | {"total_params": 1e9 * row["step"]} for row in hero()],
            "TARGET hero: total_params goes from .*one size",
        ),
        (
            [row | {"tokens": None, "tokens_per_step": 1e6 * (1 + (row["step"] > 500))} for row in ladder()],
            hero(),
            r"tokens_per_step goes from 1000000 at step 500 to 2000000 at step 550, and tokens are not given",
        ),
        (changed(3, step=2000), hero(), "beyond steps_total"),
        (changed(3, run=""), hero(), "must have names"),
        ([*ladder(), ladder()[4] | {"value": 3.0}], hero(), r"rows 5 and 61 are both a.*values"),
        (changed(3, tokens=1e9), hero(), r"tokens go from .* to 1e\+09 at step 200.*must grow"),
        (ladder(), hero(metric="eval/paloma/macro/loss"), "no metric in common.*dropless"),
        (ladder(), hero(metric="eval_dropless/paloma/macro/bpb"), "no metric in common.*bits per byte"),
        ([row | ({"value": row["value"] * 0.36} if row["run"] == "b" else {}) for row in ladder()], hero(), "mixed units"),
    ],
)
def test_bad_tables_are_refused_with_the_place(points, target, says):
    with pytest.raises(ValueError, match=says):
        forecast(points, target)


def test_one_rung_with_drops_among_dropless_ones_is_an_alarm():
    """8% apart, as the two evaluations of the reference run are."""
    points = [row | ({"value": row["value"] * 1.08} if row["run"] == "b" else {}) for row in ladder()]
    codes = {a["code"] for a in forecast(points, hero())["fit"]["alarms"]}
    assert codes & {"run_off_trend", "leave_one_out"}


def test_repeated_rows_count_once():
    once, twice = forecast(ladder(), hero()), forecast(ladder() + ladder()[:7], hero())
    assert [r["mean"] for r in once["rows"]] == [r["mean"] for r in twice["rows"]]
    assert any(a["code"] == "repeated_rows" for a in twice["fit"]["alarms"])


@pytest.mark.parametrize(
    ("points", "target", "code"),
    [
        (ladder()[:40], hero(), "few_sizes"),
        (ladder(), hero(params=2e8), "inside_range"),
        (ladder()[:-4], hero(), "unfinished_run"),
    ],
)
def test_alarms_of_tables(points, target, code):
    assert code in {a["code"] for a in forecast(points, target)["fit"]["alarms"]}


def test_one_bad_evaluation_is_told_and_changes_little():
    """A row at three times its value between good ones: the forecast moves by under half a percent, the band by a third at most."""
    plain, bad = forecast(ladder(), hero()), forecast(changed(30, value=3 * ladder()[30]["value"]), hero())
    a, b = plain["rows"][-1], bad["rows"][-1]
    assert abs(b["mean"] / a["mean"] - 1) < 0.005
    assert b["hi90"] - b["lo90"] < 4 / 3 * (a["hi90"] - a["lo90"])
    assert {x["code"] for x in bad["fit"]["alarms"]} - {x["code"] for x in plain["fit"]["alarms"]} >= {"row_off_trend"}


def test_rows_of_a_run_are_made_to_agree():
    """A size that a row lacks is its run's; a batch ramp, rows before training and total parameters for active ones are told."""
    rows = changed(3, active_params=None)
    rows[7:] = [row | {"tokens_per_step": 2 * row["tokens_per_step"]} for row in rows[7:]]
    rows.append(rows[0] | {"step": 0, "tokens": 0, "flops": 0, "value": 11.0})
    points, target, remarks = consistent.tidied(P.of_rows(rows), P.of_rows(hero(), "TARGET"))
    assert points.active_params[3] == 1e8 and len(points) == 60
    assert [code for code, _ in remarks] == ["batch_changes", "untrained_rows"]
    bare = [row | {"active_params": None} for row in hero()]
    points, target, remarks = consistent.tidied(P.of_rows(ladder()), P.of_rows(bare, "TARGET"))
    assert [code for code, _ in remarks] == ["mixed_params"]
    assert P.derived(points)["N"][0] == 1e9 and P.derived(target)["N"][0] == 2e11


def test_finished_models_under_one_name_are_taken_apart():
    rows = [row | {"run": "all", "steps_total": row["step"]} for row in ladder() if row["step"] == 1000]
    points, _, remarks = consistent.tidied(P.of_rows(rows), P.of_rows(hero(), "TARGET"))
    assert len(set(points.run)) == 3 and not remarks


def test_curves_without_progress_are_told():
    bare = [[row | {"steps_total": None} for row in rows] for rows in (ladder(), hero())]
    found = alarms.tables(P.of_rows(bare[0]), P.of_rows(bare[1], "TARGET"), METRIC)
    assert "no_progress" in {a["code"] for a in found}


def test_files_need_their_columns(tmp_path):
    file = tmp_path / "points.csv"
    file.write_text("run,metric,step,loss\na,b,1,2\n")
    with pytest.raises(ValueError, match=r"missing: steps_total.*not known: loss"):
        P.read(file, "POINTS")
    file.write_text(",".join(P.POINTS_COLUMNS) + "\na,b,1\n")
    with pytest.raises(ValueError, match=r"line 2 does not have 11 cells"):
        P.read(file, "POINTS")
    file.write_text(",".join((*P.POINTS_COLUMNS, "value")) + "\n")
    with pytest.raises(ValueError, match=r"there twice: value"):
        P.read(file, "POINTS")
    file.write_text(",".join(P.POINTS_COLUMNS) + "\n" + "," * 10 + "\na,b" + "," * 9 + "\n")
    assert len(P.read(file, "POINTS")) == 1  # an empty line of a spreadsheet is none
    file.write_text(",".join(P.POINTS_COLUMNS) + "\n" + "x" * 200_000 + "\n")
    with pytest.raises(ValueError, match=r"line \d is no line of a CSV file: field larger"):
        P.read(file, "POINTS")
    file.write_bytes("run,metric".encode("utf-16"))
    with pytest.raises(ValueError, match=r"points\.csv is no text in UTF-8"):
        P.read(file, "POINTS")
    file.write_bytes(bytes(10_000))
    with pytest.raises(ValueError, match=r"not known: .{1,90};") as raised:
        P.read(file, "POINTS")
    assert str(raised.value).isprintable()


def test_what_can_be_derived_is():
    """C = 6ND both ways, and steps times tokens per step."""
    table = P.of_rows([{"run": "r", "metric": "loss", "active_params": 2.0, "flops": 120.0}])
    assert P.derived(table)["D"] == 10
    table = P.of_rows([{"run": "r", "metric": "loss", "active_params": 2.0, "step": 5, "tokens_per_step": 3}])
    assert P.derived(table)["C"] == 180
    table = P.of_rows([{"run": "r", "metric": "loss", "tokens": 10.0, "flops": 120.0}])
    assert P.derived(table)["N"] == 2


def test_a_path_starts_at_zero_and_needs_three_rates():
    rows = [{"run": "r", "metric": "loss", "step": s, "lr": lr} for s, lr in ((10, 1.0), (20, 0.5), (30, 0.1))]
    assert P.paths(P.of_rows(rows))["r"].lr.tolist() == [0, 1, 0.5, 0.1]
    assert P.paths(P.of_rows(rows[:2])) == {}


def test_rows_without_a_forecast_say_why():
    target = hero()
    target.append(target[0] | {"step": 1, "tokens": 5e9, "flops": 6e20})
    target.append(target[0] | {"run": "other", "tokens": None, "flops": None, "tokens_per_step": None})
    rows = forecast(ladder(), target)["rows"]
    assert rows[0]["mean"] is not None and "reason" not in rows[0]
    assert rows[5]["mean"] is None and "start of a run" in rows[5]["reason"]
    assert rows[6]["mean"] is None and "tokens" in rows[6]["reason"]
    assert np.isfinite([r["mean"] for r in rows[:5]]).all()


def test_a_trend_says_nothing_of_a_row_that_says_nothing():
    """Fails when a gradient norm is forecast for a row without FLOPs or tokens, whose place nobody knows."""
    norm = "grad/norm/total"
    points = P.of_rows(rung("a", 1e8, metric=norm) + rung("b", 3e8, metric=norm) + rung("c", 9e8, metric=norm))
    empty = dict.fromkeys(P.NUMBERS)
    rows = [{"run": "hero", "metric": norm, **empty}, *hero(metric=norm)]
    told = fit.fit(points, P.of_rows(rows, "TARGET"), covariance=True)
    first, *rest = told["rows"]
    assert first["mean"] is None and "flops" in first["reason"]
    assert all(row["mean"] > 0 for row in rest) and 0 not in told["covariance"][norm]["rows"]


def test_two_runs_in_two_units_are_told():
    """Fails when a law takes up what is bits per byte in one run and nats in the other."""
    scaled = [row | {"value": 0.36 * row["value"]} for row in rung("b", 3e8)]
    told = fit.fit(P.of_rows(rung("a", 1e8) + scaled), P.of_rows(hero(), "TARGET"))
    assert any(a["code"] == "run_off_trend" and "mixed units" in a["message"] for a in told["fit"]["alarms"])
    told = fit.fit(P.of_rows(rung("a", 1e8) + rung("b", 3e8)), P.of_rows(hero(), "TARGET"))
    assert not any("mixed units" in a["message"] for a in told["fit"]["alarms"])
