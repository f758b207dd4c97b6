"""Bridges: a change of known effect, and the bands over it."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import synthetic
from scipy import stats
from synthetic import HEADLINE, few, sealed

from argosy import cli, spec
from argosy.judge import bridge, register, verify
from argosy.runs import pocket
from argosy.track import store

pytestmark = pytest.mark.usefixtures("quick")

EFFECT, AT = -0.03, 0.3
SIZES = ("d48", "d64", "d96")


def mixed(run):
    """The run with another mixture."""
    weights = tuple((name, 20.0) for name, _ in run.data.phases[0].weights)
    phases = tuple(replace(phase, weights=weights) for phase in run.data.phases)
    return replace(run, data=replace(run.data, phases=phases))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("bridged")
    hero = synthetic.voyage(home, fault=few)
    register.register(home, "hero")
    folder = synthetic.sail(home, "hero", hero, until=0.8, excess=(AT, EFFECT), fault=few)
    with store.open_writer(folder, round(0.8 * spec.steps(hero))) as writer:
        writer.lineage("change", 307, what="new mixture")
        for step in (100, 200):
            writer.event("loss_spike", step)
    for rung in synthetic.rungs_of(pocket.run()):
        if rung.name in SIZES:
            synthetic.sail(home, f"new-{rung.name}", mixed(rung.run), excess=(AT, EFFECT), fault=few)
    path, body = bridge.bridge(home, "hero", "change", [f"hero-{size}=new-{size}" for size in SIZES])
    return home, path, body


@pytest.fixture
def home(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "home")
    for path in (tmp_path / "home/forecasts/hero").glob("0002*"):
        path.unlink()
    return tmp_path / "home"


def headline(body):
    return [r for r in body["forecast"]["rows"] if r["metric"] == HEADLINE]


def test_a_known_effect_is_recovered_and_the_hero_stays_in_its_bands(made):
    home, _, body = made
    effect = body["bridge"]["effects"][HEADLINE]
    half = stats.t.ppf(0.95, effect["freedom"]) * effect["spread"]
    assert abs(effect["shift"][-1] - EFFECT) < half < 0.02 and effect["sizes"] == 3
    before = register.all_of(home, "hero")[0]
    actual = dict(zip(*(x.tolist() for x in store.read(home / "runs/hero").series(HEADLINE)), strict=True))
    after = [r for r in headline(body) if r["step"] in actual and r["step"] > 307]
    assert len(after) == 10 and all(r["lo90"] < actual[r["step"]] < r["hi90"] for r in after)
    plain = {r["step"]: r for r in headline(before)}
    assert sum(actual[r["step"]] < plain[r["step"]]["lo90"] for r in after) >= 8  # without the bridge it had left them


def test_rows_before_stay_and_rows_after_are_wider(made):
    home, _, body = made
    before = register.all_of(home, "hero")[0]
    effect = body["bridge"]["effects"][HEADLINE]
    for old, new in zip(headline(before), headline(body), strict=True):
        if old["step"] <= 307:
            assert new == old
            continue
        shift = effect["shift"][effect["step"].index(old["step"])]
        assert new["mean"] == pytest.approx(old["mean"] * math.exp(shift), rel=1e-12)
        for side in ("lo", "hi"):
            was = math.log(old[f"{side}90"] / old["mean"])
            own = stats.t.ppf(0.95, effect["freedom"]) * effect["spread"]
            assert abs(math.log(new[f"{side}90"] / new["mean"])) == pytest.approx(math.hypot(was, own), rel=1e-9)
    old, new = (b["forecast"]["covariance"][HEADLINE] for b in (before, body))
    after = np.array([body["forecast"]["rows"][i]["step"] > 307 for i in new["rows"]])
    grown = np.array(new["matrix"]) - np.array(old["matrix"])
    common = grown[np.ix_(after, after)]
    assert np.allclose(common, common[0, 0], rtol=0.01) and common[0, 0] >= effect["spread"] ** 2
    assert not grown[~after].any()
    assert np.linalg.eigvalsh(np.array(new["matrix"])).min() > -1e-7


def test_the_successor_says_what_it_is(made):
    home, path, body = made
    first = register.all_of(home, "hero")[0]
    assert path.name == "0002.json" and body["supersedes"] == first["sha256"]
    assert body["bridge"]["event"]["kind"] == "change" and body["bridge"]["event"]["step"] == 307
    assert body["bridge"]["updates"] == 819 and body["late"] is None
    assert list(body["bridge"]["changed"]) == ["data.phases"]
    new = register.identity(mixed(pocket.run()), "5f1d77c2")
    assert body["identity"] == new | {"recipe": "pocket"}
    assert first["identity"]["mixture"] != body["identity"]["mixture"]


def test_verify_holds_and_finds_a_changed_pair(made, tmp_path):
    _, path, body = made
    found = verify.verify(path)
    assert found["ok"] and found["bridged"]
    other = json.loads(json.dumps(body))
    other["bridge"]["pairs"][0]["ratios"][HEADLINE][-1][1] += 1e-3
    (tmp_path / "0002.json").write_text(json.dumps(sealed(other)))
    found = verify.verify(tmp_path / "0002.json")
    assert found["hash"] and not found["numbers"] and {"effect", "mean"} <= {d["what"] for d in found["differs"]}


def test_one_pair_is_wider_than_three_and_a_second_bridge_stands_on_the_first(home):
    _, one = bridge.bridge(home, "hero", "change@307", ["d96=new-d96"])
    three = 0.008
    effect = one["bridge"]["effects"][HEADLINE]
    assert effect["freedom"] == bridge.FREEDOM and effect["sizes"] == 1
    assert abs(effect["shift"][-1] - EFFECT) < stats.t.ppf(0.95, effect["freedom"]) * effect["spread"]
    assert effect["spread"] > three / 3
    with pytest.raises(ValueError, match="bridged already"):
        bridge.bridge(home, "hero", "change", ["d96=new-d96"])
    with store.open_writer(home / "runs/hero", 819) as writer:
        writer.lineage("change", 307, what="gates decay")  # noted later, of the same update
    assert bridge.the_event(store.read(home / "runs/hero"), "change")["fields"] == {"what": "new mixture; gates decay"}
    path, two = bridge.bridge(home, "hero", "loss_spike@200", ["d64=new-d64"])
    assert two["bridge"]["first"]["number"] == 1 and "bridged (after 819 updates)" in register.line(two)
    assert [b["event"]["step"] for b in bridge.history(two["bridge"])] == [307, 200]
    assert verify.consistent(two) == []
    again, effects = bridge.applied(register.all_of(home, "hero")[0]["forecast"], two["bridge"], pocket.run())
    assert verify.same(again["rows"], two["forecast"]["rows"], 1e-9) and len(effects) == 2
    assert path.name == "0003.json"


def test_events_are_named_or_listed(home):
    for asked, said in (
        ("loss_spike", "2 records of 'loss_spike'.*loss_spike@100.*loss_spike@200"),
        ("nothing", "no event or change 'nothing'.*change@307"),
        ("change@308", "change@307"),
        ("change@x", "KIND or KIND@STEP"),
    ):
        with pytest.raises(ValueError, match=said):
            bridge.bridge(home, "hero", asked, ["d96=new-d96"])


def test_what_is_no_pair_is_refused(home):
    rungs = {rung.name: rung.run for rung in synthetic.rungs_of(pocket.run())}
    synthetic.sail(home, "half", mixed(rungs["d96"]), until=0.5, fault=few)
    synthetic.sail(home, "copy", rungs["d96"], fault=few)
    for pairs, said in (
        ([], "at least one rung"),
        (["d96"], "OLD=NEW"),
        (["d97=new-d96"], "OLD one of"),
        (["d96=new-d48"], "two sizes"),
        (["d96=half"], "half' has 387 of 774 updates"),
        (["d96=copy"], "differ in nothing"),
        (["d96=new-d96", "d64=new-d96"], "named twice"),
        (["d96=nowhere"], "nowhere"),
    ):
        with pytest.raises(ValueError, match=said):
            bridge.bridge(home, "hero", "change", pairs)
    assert not (home / "forecasts/hero/0002.json").exists()
    with pytest.raises(ValueError, match="no forecast of 'other'"):
        bridge.bridge(home, "other", "change", ["d96=new-d96"])


def test_a_change_from_the_start_is_said_to_be_one(home):
    rung = next(r.run for r in synthetic.rungs_of(pocket.run()) if r.name == "d96")
    synthetic.sail(home, "early", mixed(rung), excess=(0.0, EFFECT), fault=few)
    _, body = bridge.bridge(home, "hero", "change", ["d96=early"])
    assert any(a["code"] == "rerun_differs_before" for a in body["forecast"]["fit"]["alarms"])


def test_a_metric_that_the_rerun_lacks_has_no_forecast_after_it(home):
    rung = next(r.run for r in synthetic.rungs_of(pocket.run()) if r.name == "d96")
    keep = lambda name, done, row: {k: v for k, v in row.items() if k == HEADLINE}  # noqa: E731
    synthetic.sail(home, "less", mixed(rung), excess=(AT, EFFECT), fault=keep)
    _, body = bridge.bridge(home, "hero", "change", ["d96=less"])
    norms = [r for r in body["forecast"]["rows"] if r["metric"] == "grad/norm/total"]
    assert all((r["mean"] is None) == (r["step"] > 307) for r in norms) and "not known" in norms[-1]["reason"]
    block = body["forecast"]["covariance"]["grad/norm/total"]
    assert all(body["forecast"]["rows"][i]["step"] <= 307 for i in block["rows"])
    assert np.array(block["matrix"]).shape == (len(block["rows"]),) * 2


@pytest.mark.parametrize("decades", [[-0.5], [-1.5, -0.5], [-2.0, -1.3, -0.8, -0.5]])
def test_intervals_of_the_hero_cover(decades):
    """Over changes whose effect moves with size as the prior says: the 90% interval holds the hero's effect about that often."""
    rng, x, inside, noise = np.random.default_rng(1), np.array(decades), [], 0.001
    for _ in range(200):
        effect = rng.normal() * 0.02
        slope = rng.normal() * bridge.TRANSFER * abs(effect)
        luck = math.sqrt(2) * bridge.LUCK * rng.normal(size=len(x) + 1)
        values = (effect + slope * x + luck[1:])[:, None] + noise * rng.normal(size=(len(x), 14))
        found = bridge.pooled(values, x, noise)
        half = stats.t.ppf(0.95, found["freedom"]) * found["spread"]
        inside.append(abs(np.mean(found["shift"]) - effect - luck[0]) < half)
    assert 0.84 < np.mean(inside) < 0.99


def test_one_odd_pair_does_not_decide():
    x = np.array([-2.0, -1.5, -1.0, -0.5, -0.4])
    values = np.full((5, 10), -0.02)
    values[1] += 0.2
    assert abs(np.mean(bridge.pooled(values, x, 0.001)["shift"]) + 0.02) < 0.02


def test_the_command(home, capsys):
    words = ["forecast", "bridge", "hero", "--event", "change", "--home", str(home)]
    cli.main([*words, "--rerun", "d48=new-d48", "--rerun", "d96=new-d96"])
    shown = "".join(capsys.readouterr().out.split())  # lines break anywhere in long paths
    assert all(text in shown for text in ("bridgeoverchangeatupdate307(30%oftherun)", "data.phases", "0002.json"))
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--rerun", "d48=new-d48"])
    assert ended.value.code == 2 and "bridged already" in capsys.readouterr().err
