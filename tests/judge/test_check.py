"""The check before a launch: growth with honest errors, each rule on a planted fault, the verdict and its exit status."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from scipy.signal import lfilter

from argosy import cli, spec
from argosy.judge import check as C
from argosy.judge import findings as F
from argosy.judge import growth as G
from argosy.judge import ladders
from argosy.judge.findings import CAUTION, GO, NO_GO
from argosy.runs import pocket
from argosy.track import log as logs

RUNGS = {rung.name: rung for rung in synthetic.rungs_of(pocket.run())}


def climbed(
    home: Path, rung: str, fault: synthetic.Fault | None = None, until: float = 1.0, run: spec.Run | None = None
) -> C.Climbed:
    """A synthetic rung of pocket, read back."""
    run = run or RUNGS[rung].run
    log = logs.read(synthetic.sail(home, f"hero-{rung}", run, until, fault=fault))
    return C.Climbed(log.name, RUNGS[rung].purpose, run, log, G.growth(log))


def power(exponent: float, *names: str) -> synthetic.Fault:
    """Named gradient norms go as progress^exponent, with the noise they had."""

    def change(_: str, done: float, row: synthetic.Row) -> synthetic.Row:
        return row | {n: row[n] * math.exp(0.4 * done) * max(done, 1e-3) ** exponent for n in names if n in row}

    return change


def levels(evidence: list[F.Evidence]) -> dict[str, str]:
    """The worst level of each rule."""
    return {e.rule: e.level for e in sorted(evidence, key=lambda e: F.LEVELS.index(e.level))}


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_the_error_of_a_slope_knows_of_autocorrelation(alike: float):
    """Fails when the 95% interval of a slope under correlated noise covers the truth in fewer than 90% or more than 99% of 300 runs."""
    rng, steps = np.random.default_rng(1), np.arange(100, 1000)
    noise = lfilter([1], [1, -alike], rng.normal(size=(300, 1500)), axis=1)[:, 600:] * 0.1
    found = [G.trend(steps, np.exp(0.3 * np.log(steps) + e)) for e in noise]
    covered = np.mean([t.bound(-1, 0.025) < 0.3 < t.bound(1, 0.025) for t in found])
    assert 0.9 <= covered <= 0.99
    spread = np.std([t.slope for t in found])
    assert 0.8 < np.mean([t.error for t in found]) / spread < 1.25


def test_growth_reads_a_known_power_and_its_peak(tmp_path: Path):
    """Fails when the exponent, the place or the height of the peak of a curve that is known come out wrong, or when warm-up is read."""
    steps = np.arange(1, 2001)
    values = np.where(steps < 150, 50.0, 3.0 * (steps / 1000) ** 0.7)
    grown = G.of_series("grad/norm/total", steps, values, total=4000)
    assert math.isclose(grown.whole.slope, 0.7, abs_tol=0.01)
    assert math.isclose(grown.late.slope, 0.7, abs_tol=0.01)
    assert math.isclose(grown.peak, 3.0 * 2**0.7, rel_tol=0.02)
    assert 0.48 < grown.peak_at <= 0.5
    assert G.of_series("x", steps[:9], values[:9], total=4000).late == G.UNKNOWN


def test_growth_of_a_run_that_ends_in_nan():
    steps = np.arange(1, 1001)
    found = G.of_series("grad/norm/total", steps, np.where(steps > 850, math.nan, 1.0), 1000)
    assert math.isnan(found.last) and found.peak == 1.0 and found.whole.slope == pytest.approx(0.0)


def test_a_run_without_faults_shows_none(tmp_path: Path):
    """Fails when a rule speaks against a synthetic rung in which nothing grows but what should."""
    rung = climbed(tmp_path, "d48")
    evidence = F.of_run(rung.log) + F.planned(rung.log, rung.run)
    assert {e.level for e in evidence} == {GO}
    assert {"gradient level", "gradient growth", "drops", "router bias", "loss rise"} <= set(levels(evidence))


def scaled(factor: float, *names: str, begin: float = 0.5) -> synthetic.Fault:
    def change(_: str, done: float, row: synthetic.Row) -> synthetic.Row:
        return row | {n: row[n] * factor for n in names if n in row and done >= begin}

    return change


@pytest.mark.parametrize(
    ("rule", "level", "fault"),
    [
        ("gradient level", CAUTION, scaled(2.5, "grad/norm/total")),
        ("gradient level", NO_GO, scaled(6.0, "grad/norm/total")),
        ("gradient growth", CAUTION, power(0.9, "grad/norm/readout")),
        ("drops", CAUTION, scaled(4.0, "moe/drop_fraction")),
        ("router bias", NO_GO, scaled(300.0, "train/router/bias_min")),
        ("loss rise", NO_GO, scaled(1.3, "train/cross_entropy_loss", begin=0.93)),
        ("finite", NO_GO, scaled(math.nan, "train/cross_entropy_loss", begin=0.6)),
    ],
)
def test_a_planted_fault_is_found_by_its_rule_alone(tmp_path: Path, rule: str, level: str, fault: synthetic.Fault):
    """Fails when a fault in one statistic is missed, is not as bad as its rule says, or spoils another rule."""
    rung = climbed(tmp_path, "d48", fault)
    found = levels(F.of_run(rung.log))
    assert found.pop(rule) == level
    assert set(found.values()) <= {GO}


def test_logits_and_parameters_that_grow(tmp_path: Path):
    """Fails when the logits' scale is not measured in ln(vocabulary), or a parameter group that outgrows a random walk is missed."""

    def change(_: str, done: float, row: synthetic.Row) -> synthetic.Row:
        if "train/loss" not in row:
            return row
        return row | {"train/logit_z": (2 * math.log(4096)) ** 2, "params/norm/head_gate": 10 * max(done, 1e-3) ** 0.8}

    rung = climbed(tmp_path, "d48", change)
    evidence = {e.rule: e for e in F.of_run(rung.log)}
    assert evidence["logit scale"].level == CAUTION
    assert math.isclose(evidence["logit scale"].value, 2.0, rel_tol=1e-6)
    assert evidence["parameter growth"].level == CAUTION
    assert "head_gate" in evidence["parameter growth"].says


def test_growth_that_rises_with_the_batch(tmp_path: Path):
    """Fails when a gradient that grows faster at the larger batch is missed, or the size of the difference is wrong."""
    size = climbed(tmp_path, "d64", power(0.5, "grad/norm/readout", "grad/norm/total"))
    small = climbed(tmp_path, "d64-small-batch", power(0.2, "grad/norm/readout", "grad/norm/total"))
    doublings = math.log2(size.run.data.batch_seqs / small.run.data.batch_seqs)
    rows = C.with_batch([size, small])
    row = next(r for r in rows if r["metric"] == "grad/norm/readout")
    assert math.isclose(row["more"], 0.3 / doublings, abs_tol=4 * row["error"])
    (found,) = C.judge_batch(rows)
    assert found.level == CAUTION
    same = climbed(tmp_path / "same", "d64-small-batch", power(0.5, "grad/norm/readout", "grad/norm/total"))
    (found,) = C.judge_batch(C.with_batch([size, same]))
    assert found.level == GO


def test_growth_that_rises_with_width_is_carried_to_the_hero(tmp_path: Path):
    """Fails when exponents that rise with width are not extrapolated to the hero's, or equal ones are taken for rising."""
    hero = pocket.run()
    exponents = {32: 0.1, 48: 0.25, 64: 0.35, 96: 0.5}  # about 0.36 per factor e: 0.61 at 128
    rising = [climbed(tmp_path, f"d{w}", power(x, "grad/norm/total")) for w, x in exponents.items()]
    row = next(r for r in C.with_width(rising, hero) if r["metric"] == "grad/norm/total")
    line = np.polyfit(np.log(list(exponents)), list(exponents.values()), 1)
    assert math.isclose(row["at_hero"], np.polyval(line, math.log(128)), abs_tol=0.06)
    (found,) = C.judge_width([row])
    assert found.level == CAUTION
    level = [climbed(tmp_path / "level", f"d{w}", power(0.3, "grad/norm/total")) for w in exponents]
    (found,) = C.judge_width(C.with_width(level, hero))
    assert found.level == GO


def test_luck_between_seeds_widens_what_is_compared(tmp_path: Path):
    """Fails when two seeds whose slopes differ leave the error of a comparison as small as the slopes' own errors."""
    a = climbed(tmp_path, "d64", power(0.5, "grad/norm/total"))
    b = climbed(tmp_path, "d64-seed1", power(0.3, "grad/norm/total"))
    small = climbed(tmp_path, "d64-small-batch", power(0.5, "grad/norm/total"))
    alone, with_seed = C.with_batch([a, small]), C.with_batch([a, b, small])
    assert with_seed[0]["error"] > alone[0]["error"]
    assert math.isclose(C.luck([a, b], ["grad/norm/total"]), 0.2 / math.sqrt(2), rel_tol=0.2)


@pytest.mark.usefixtures("quick")
def test_the_whole_check_of_a_ladder_and_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Fails when a rung with a norm above 4 does not forbid the launch, or JSON, table and exit status disagree about it."""
    spoilt = scaled(6.0, "grad/norm/total", "grad/norm/readout")

    def fault(name: str, done: float, row: synthetic.Row) -> synthetic.Row:
        return spoilt(name, done, row) if name == "hero-d96" else row

    synthetic.voyage(tmp_path, fault=fault)
    with pytest.raises(SystemExit) as status:
        cli.main(["ladder", "check", "hero", "--home", str(tmp_path), "--json"])
    assert status.value.code == 3
    body = json.loads(capsys.readouterr().out)
    assert body["verdict"] == NO_GO
    assert [body["evidence"][0][k] for k in ("rule", "where", "level")] == ["gradient level", "hero-d96", NO_GO]
    assert {"grad/norm/total", "eval_dropless/stdlib/macro_bpb"} <= set(body["hero"])
    assert set(body["growth"]) == {f"hero-{name}" for name in RUNGS}
    order = [F.LEVELS.index(e["level"]) for e in body["evidence"]]
    assert order == sorted(order, reverse=True)


@pytest.mark.usefixtures("quick")
def test_sizes_that_are_not_finished_are_none(tmp_path: Path):
    """Fails when unfinished and missing rungs are not told, or two finished sizes of four let a hero go."""
    ladders.save(tmp_path, "hero", pocket.run(), [RUNGS[n] for n in ("d32", "d48", "d64", "d96")])
    for name, until in (("d32", 1.0), ("d48", 1.0), ("d64", 0.6)):
        synthetic.sail(tmp_path, f"hero-{name}", RUNGS[name].run, until=until)
    body = C.check(tmp_path, "hero")
    assert body["verdict"] == NO_GO
    told = {(e["rule"], e["where"]): e["says"] for e in body["evidence"] if e["level"] != GO}
    assert "2 of 4 sizes are finished" in told["too few sizes", "hero"]
    assert "argosy ladder hero --run goes on" in told["too few sizes", "hero"]
    assert {("unfinished rung", "hero-d64"), ("unfinished rung", "hero-d96")} <= set(told)
    synthetic.sail(tmp_path, "hero-d64", RUNGS["d64"].run, begin=0.6)
    found = C.unfinished(C.points.gather(tmp_path, "hero", []), "hero")
    assert [(e.level, e.rule, e.where) for e in found] == [(CAUTION, "unfinished rung", "hero-d96")]


def test_one_run_can_be_checked_and_an_unknown_name_cannot(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Fails when a run without a ladder is refused, or a name that is neither gives a traceback."""
    synthetic.sail(tmp_path, "lone", replace(RUNGS["d32"].run, seed=5))
    cli.main(["ladder", "check", "lone", "--home", str(tmp_path)])
    assert capsys.readouterr().out.startswith("GO  lone: nothing")
    with pytest.raises(SystemExit) as status:
        cli.main(["ladder", "check", "nobody", "--home", str(tmp_path)])
    assert status.value.code == 2
    assert "no ladder of 'nobody'" in capsys.readouterr().err
