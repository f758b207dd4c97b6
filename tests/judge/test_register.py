"""A registered forecast: what it holds, and that it cannot be changed quietly."""

import json
import queue
import shutil
import signal
import stat
import threading
import time
from dataclasses import replace

import pytest
import synthetic
from synthetic import HEADLINE, few, sealed

from argosy import cli, spec, voyage
from argosy.judge import fits, ladders, points, register, verdict, verify, witness
from argosy.runs import pocket
from argosy.track import store

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("registered")
    synthetic.voyage(home, fault=few)
    path, body = register.register(home, "hero")
    return home, path, body


@pytest.fixture
def home(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def no_fit(monkeypatch, made):
    """Fits as they came out for the ladder, where a test is about the file alone."""
    forecast = json.dumps(made[2]["forecast"])
    for module in (register, fits):
        monkeypatch.setattr(module, "fit_rows", lambda *_, **__: json.loads(forecast))


def changed(path, old, new, rehash):
    """A copy of a file with one text in place of another, its hash made to fit or left."""
    text = path.read_text()
    assert old in text
    body = json.loads(text.replace(old, new, 1))
    other = path.with_name("changed.json")
    other.write_text(json.dumps(sealed(body) if rehash else body))
    return other


def test_it_holds_what_it_rests_on(made):
    home, path, body = made
    assert path == home / "forecasts" / "hero" / "0001.json" and json.loads(path.read_text()) == body
    assert stat.S_IMODE(path.stat().st_mode) == 0o444 and sorted(p.name for p in path.parent.iterdir()) == [
        "0001.json",
        "page.json",
    ]
    assert spec.from_json(body["hero"]) == pocket.run() and body["identity"]["key"] == pocket.run().key()
    assert body["identity"]["corpus_checksum"] == "5f1d77c2" and body["late"] is None and body["bridge"] is None
    assert [r["name"] for r in body["ladder"]] == [f"hero-{r.name}" for r in synthetic.rungs_of(pocket.run())]
    assert all(r["finished"] and r["steps"] == r["steps_total"] for r in body["ladder"])
    assert len(body["data"]["target"]) == len(body["forecast"]["rows"]) == 40
    assert len(body["data"]["points"]) == 6 * 20 * 2
    assert body == sealed(body)
    assert body["sha256"] in register.line(body) and "0001" in register.line(body)


def test_the_forecast_is_of_the_law_behind_the_ladder(made):
    """The hero of the same law lies in the 90% bands, which are not wide."""
    rows = [r for r in made[2]["forecast"]["rows"] if r["metric"] == HEADLINE]
    hero = pocket.run()
    true = [synthetic.evaluation(hero, "hero", row["step"], 0)[HEADLINE] for row in rows]
    assert all(row["mean"] == pytest.approx(value, rel=0.015) for row, value in zip(rows[1:], true[1:], strict=True))
    assert rows[-1]["lo90"] < true[-1] < rows[-1]["hi90"]
    assert rows[-1]["hi90"] / rows[-1]["lo90"] < 1.1


def forged(body):
    """What moves a verdict or a reader's trust, with the hash made again."""
    fit = body["forecast"]["fit"]
    body["forecast"]["covariance"][HEADLINE]["zero"] = 5.0
    fit["noise"][HEADLINE], fit["parameters"] = 0.5, {}
    fit["alarms"] = [a for a in fit["alarms"] if HEADLINE not in a["message"]]
    body["ladder"][0]["steps"] = 99_999
    return sealed(body)


def test_verify_holds_and_finds_a_changed_digit(made, tmp_path):
    _, path, body = made
    assert verify.verify(path)["ok"]
    path = tmp_path / shutil.copy(path, tmp_path)
    digit = changed(path, '"argosy": "', '"argosy": "9', rehash=False)
    found = verify.verify(digit)
    assert not found["ok"] and not found["hash"] and found["numbers"]
    mean = [r["mean"] for r in body["forecast"]["rows"] if r["metric"] == HEADLINE][12]
    number = changed(path, f'"mean": {mean!r}', f'"mean": {mean * (1 + 1e-2)!r}', rehash=True)
    told = body["forecast"]["fit"]["alarms"]
    number = changed(number.rename(tmp_path / "number.json"), f'"alarms": {json.dumps(told)}', '"alarms": []', rehash=True)
    found = verify.verify(number)
    assert found["hash"] and not found["numbers"] and not found["ok"]
    assert [d["what"] for d in found["differs"]] == ["mean"] and found["differs"][0]["registered"] == mean * (1 + 1e-2)
    row = next(r for r in body["forecast"]["rows"] if r["mean"] == mean)
    far = mean * 1e-2 / ((row["hi90"] - row["lo90"]) / 2)
    assert f"{far:.2g} of half a 90% band" in found["problems"][1] and told[0]["code"] in found["problems"][0]
    close = changed(path, f'"mean": {mean!r}', f'"mean": {mean * (1 + 1e-5)!r}', rehash=True)
    found = verify.verify(close)
    assert found["ok"] and not found["exact"] and "no more than that is vouched for" in found["note"]
    (tmp_path / "forged.json").write_text(json.dumps(forged(json.loads(json.dumps(body)))))
    found = verify.verify(tmp_path / "forged.json")
    assert found["hash"] and not found["ok"] and "99,999 of" in found["problems"][0]
    assert any("alarms that the file does not" in problem for problem in found["problems"])
    assert {d["what"] for d in found["differs"]} == {"covariance far off", "noise far off", "parameters far off"}
    hero = changed(path, '"batch_seqs": 8', '"batch_seqs": 16', rehash=True)
    assert any("identity" in p for p in verify.consistent(register.load(hero)))


def test_a_second_one_needs_a_reason_and_supersedes(home, no_fit, made):
    with pytest.raises(ValueError, match=r"0001 .*--reason"):
        register.register(home, "hero")
    path, body = register.register(home, "hero", reason="two more rungs")
    assert path.name == "0002.json" and body["supersedes"] == made[2]["sha256"] and body["reason"] == "two more rungs"
    assert [b["number"] for b in register.all_of(home, "hero")] == [1, 2]
    assert register.newest(home, "hero") == body
    assert (home / "forecasts/hero/0001.json").read_bytes() == made[1].read_bytes()
    assert verify.supersedes(path, body) == []
    (home / "forecasts/hero/0001.json").unlink()
    with pytest.raises(ValueError, match=r"0001\.json is missing"):
        register.all_of(home, "hero")


def one(home, barrier, answers):
    barrier.wait()
    try:
        body = {"created_s": time.time(), "created": "now"}
        answers.put(register.write(home, "other", body, None)[0].name)
    except Exception as error:  # told to the test
        answers.put(str(error))


def test_several_at_once_do_not_overwrite(tmp_path):
    barrier, answers = threading.Barrier(4), queue.Queue()
    workers = [threading.Thread(target=one, args=(tmp_path, barrier, answers)) for _ in range(4)]
    for worker in workers:
        worker.start()
    told = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert told.count("0001.json") == 1 and sum("another process" in t for t in told) == 3
    assert [p.name for p in (tmp_path / "forecasts/other").iterdir()] == ["0001.json"]


def test_late_is_marked_for_ever(home, no_fit):
    hero = pocket.run()
    synthetic.sail(home, "hero", hero, until=0.05, fault=few)
    _, body = register.register(home, "hero", reason="after it began")
    assert body["late"] == {"updates": 51} and "late (after 51 updates)" in register.line(body)
    shutil.rmtree(home / "runs" / "hero")
    _, body = register.register(home, "hero", reason="the log is gone")
    assert body["late"] == {"updates": 51}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", ["fit", "link"])
def test_an_interrupted_registration_leaves_nothing(home, no_fit, monkeypatch, capsys, number, at):
    """Fails when a signal while it is fitted or written ends in silence, another status than 130, or half a file."""
    before = sorted(p.name for p in (home / "forecasts/hero").iterdir())
    interrupt = lambda *_, **__: signal.raise_signal(number)  # noqa: E731
    monkeypatch.setattr(*((register, "fit_rows") if at == "fit" else (register.os, "link")), interrupt)
    old = signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # where the command does not listen, the test fails and not the session
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with pytest.raises(SystemExit) as ended:
        cli.main(["forecast", "register", "hero", "--reason", "again", "--home", str(home)])
    assert (ended.value.code, capsys.readouterr().err) == (130, "argosy: interrupted\n")
    assert sorted(p.name for p in (home / "forecasts/hero").iterdir()) == before
    signal.signal(signal.SIGINT, ours)
    assert signal.signal(signal.SIGTERM, old) is not signal.default_int_handler


def test_a_hero_whose_lineage_is_lost_is_late_by_its_rows(home):
    synthetic.sail(home, "hero", pocket.run(), 0.1)
    before = register.late(home, "hero", None)
    assert before and before["updates"] > 50
    (home / "runs/hero/lineage.jsonl").write_text("")
    assert register.late(home, "hero", None) == before


def test_a_hero_that_has_begun_no_update_is_not_late(home, no_fit):
    synthetic.sail(home, "hero", pocket.run(), until=0.0, fault=few)
    assert register.register(home, "hero", reason="again")[1]["late"] is None


def test_a_hero_that_is_still_compiled_is_not_late(home, no_fit):
    folder = home / "runs" / "hero"
    store.create(folder, spec.to_json(pocket.run()), {})
    store.open_writer(folder, 0).close("stopped")
    assert register.register(home, "hero", reason="again")[1]["late"] is None


def test_clocks_that_go_backwards_are_refused(home, no_fit, monkeypatch):
    now = register.newest(home, "hero")["created_s"]
    monkeypatch.setattr(register.time, "time", lambda: now - 1)
    with pytest.raises(ValueError, match="successor cannot be older"):
        register.register(home, "hero", reason="again")
    shutil.rmtree(home / "forecasts")
    monkeypatch.setattr(register.time, "time", lambda: now - 86_400)
    with pytest.raises(ValueError, match="the last row of hero-d"):
        register.register(home, "hero")


def test_too_few_sizes_and_another_hero_are_refused(home):
    shutil.rmtree(home / "forecasts")
    with pytest.raises(ValueError, match=r"data\.batch_seqs 16, not 8"):
        register.register(home, "hero", spec.override(pocket.run(), ["data.batch_seqs=16"]))
    for name in ("d32", "d48"):
        shutil.rmtree(home / "runs" / f"hero-{name}")
    with pytest.raises(ValueError, match="at least 3 sizes"):
        register.register(home, "hero")
    assert not (home / "forecasts").exists()


def test_unfinished_rungs_and_a_hero_inside_the_range_are_alarms(tmp_path):
    rungs = synthetic.rungs_of(pocket.run())[:4]
    hero = pocket.rung(64)
    hero = replace(hero, optim=replace(hero.optim, horizon_tokens=hero.optim.horizon_tokens * 2))
    ladders.save(tmp_path, "hero", hero, rungs)
    only = lambda name, done, row: {k: v for k, v in row.items() if k == HEADLINE}  # noqa: E731
    for rung, until in zip(rungs, (1, 1, 1, 0.6), strict=True):
        synthetic.sail(tmp_path, f"hero-{rung.name}", rung.run, until=until, fault=only)
    _, body = register.register(tmp_path, "hero")
    told = {a["code"]: a["message"] for a in body["forecast"]["fit"]["alarms"]}
    assert "hero-d96 ends at 55" in told["unfinished_run"]
    assert "inside_range" in told
    assert [r["finished"] for r in body["ladder"]] == [True, True, True, False]


def test_nothing_is_held_against_a_file_that_was_changed(home, made):
    path = home / "forecasts/hero/0001.json"
    path.chmod(0o644)
    for old, new in (('"reason": ""', '"reason": "a"'), ('"late": null', '"late": {"updates": 1}')):
        path.write_text(made[1].read_text().replace(old, new, 1))
        with pytest.raises(ValueError, match=r"0001\.json is not what was registered here"):
            verdict.judge(home, "hero")
    path.write_bytes(made[1].read_bytes())
    assert verdict.judge(home, "hero")["forecast"]["number"] == 1
    (home / "forecasts/other").mkdir()
    shutil.copy(path, home / "forecasts/other/0001.json")
    with pytest.raises(ValueError, match="not what was registered here"):
        verdict.judge(home, "other")


def test_damaged_files_are_named_and_left(home):
    path = home / "forecasts/hero/0001.json"
    path.chmod(0o644)
    path.write_text(path.read_text()[:2000])
    with pytest.raises(ValueError, match=r"0001\.json is not what was registered"):
        register.newest(home, "hero")
    ladder = ladders.path_of(home, "hero")
    ladder.write_text(ladder.read_text()[:200])
    shutil.rmtree(home / "forecasts")
    with pytest.raises(ValueError, match=r"hero\.json is not what was written"):
        register.register(home, "hero")


def test_a_witness_is_noted_beside_it(home, capsys):
    before = (home / "forecasts/hero/0001.json").read_bytes()
    cli.main(["forecast", "witness", "hero", "--at", "https://example.org/tag/1", "--home", str(home)])
    cli.main(["forecast", "witness", "hero", "--at", "commit 12ab", "--home", str(home), "--json"])
    body = register.newest(home, "hero")
    assert [w["at"] for w in witness.noted(home, body)] == ["https://example.org/tag/1", "commit 12ab"]
    page = json.loads((home / "forecasts/hero/page.json").read_bytes())
    assert page["forecast"]["witness"] == ["https://example.org/tag/1", "commit 12ab"]
    assert (home / "forecasts/hero/0001.json").read_bytes() == before and len(register.all_of(home, "hero")) == 1
    with pytest.raises(ValueError, match="--at WHERE"):
        witness.note(home, "hero", " ")
    with pytest.raises(ValueError, match="--at WHERE"):
        witness.note(home, "hero", "https://x\n\x1b[31mverified")
    with pytest.raises(ValueError, match="no forecast of 'nobody'"):
        witness.note(home, "nobody", "here")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"witnesses": [{"sha256": "SHA"}]}', '{"witnesses": [{"sha256": "SHA", "at": 3}]}']
)
def test_a_damaged_witness_is_told_and_kept(home, capsys, text):
    """Fails when a note that cannot be read ends a verdict, is not told wherever witnesses are, or is written over."""
    synthetic.sail(home, "hero", pocket.run(), until=0.1, fault=few)
    body = register.newest(home, "hero")
    path = witness.path_of(home, body)
    path.write_text(text.replace("SHA", body["sha256"]))
    before = path.read_bytes()
    found = verdict.judge(home, "hero")
    assert found["verdict"] == "on track" and found["forecast"]["witness"] == []
    assert f"{path} is damaged" in found["forecast"]["witness_damaged"]
    drawn = json.loads((home / "forecasts/hero/page.json").read_bytes())
    assert drawn["forecast"]["witness_damaged"] == found["forecast"]["witness_damaged"]
    cli.main(["forecast", "judge", "hero", "--home", str(home)])
    assert "the file of its witnesses is damaged" in " ".join(capsys.readouterr().out.split())
    assert "the file of its witnesses is damaged" in voyage.against(found)
    with pytest.raises(SystemExit) as ended:
        cli.main(["forecast", "witness", "hero", "--at", "elsewhere", "--home", str(home)])
    assert ended.value.code == 2 and "0001.witness.json is damaged" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_the_commands(home, no_fit, capsys):
    cli.main(["forecast", "fit", "hero", "--home", str(home)])
    shown = capsys.readouterr().out
    assert HEADLINE in shown and "grad/norm/total" in shown and "at the end of the run" in shown
    cli.main(["forecast", "fit", "hero", "--home", str(home), "--json"])
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 40
    cli.main(["forecast", "register", "hero", "--home", str(home), "--reason", "once more"])
    shown = capsys.readouterr().out
    assert "0002.json" in shown and "sha256" in shown and "git tag" in shown
    for wrong in ([], ["hero", "--points", "x.csv"], ["--points", "x.csv"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["forecast", "fit", *wrong])
        assert ended.value.code == 2
    path = home / "forecasts/hero/0001.json"
    other = changed(path, '"number": 1', '"number": 7', rehash=False)
    monkey = register.load(other)
    assert monkey["number"] == 7
    with pytest.raises(SystemExit) as ended:
        cli.main(["forecast", "verify", str(other)])
    assert ended.value.code == 1 and "FAILS" in capsys.readouterr().out


def test_points_of_the_file_are_those_of_the_store(made):
    home, _, body = made
    rows, asked = points.fitted(points.gather(home, "hero"), "hero", "joint")
    assert body["data"] == {"points": [register.lean(row) for row in rows], "target": asked}
    assert all(row["lr"] is None for row in rows + asked)


def test_a_file_that_was_tampered_with_in_any_place_is_told_in_words(made, no_fit, tmp_path):
    """Whatever stands in any place of it, and with a hash that fits: verify says that it does not hold, or that it is none."""
    body = made[2]
    assert verify.verify(made[1])["ok"]
    deep = [("data", "points"), ("data", "target"), ("forecast", "rows"), ("forecast", "fit"), ("forecast", "covariance")]
    places = [
        (key,) for key in body if key not in ("sha256", "code", "packages", "reason", "created", "method", "seed", "late")
    ]
    for place in [*places, *deep]:
        for value in (None, "x", [], {}, [3], {"a": 1}, -7):
            other = json.loads(json.dumps(body))
            inner = other[place[0]] if len(place) == 2 else other
            if inner[place[-1]] == value or (place == ("data", "points")):
                continue  # the refit is a stand-in here, which reads no points
            inner[place[-1]] = value
            path = tmp_path / "0001.json"
            path.write_text(json.dumps(sealed(other)))
            try:
                found = verify.verify(path)
            except ValueError as error:
                assert "0001.json is not what was registered" in str(error), place
                continue
            assert not found["ok"], (place, value)


@pytest.mark.parametrize("part", ["rows", "some rows", "covariance", "negative", "identity", "bridge", "ladder"])
def test_a_forged_inside_is_said_by_who_judges(made, tmp_path, part):
    """Fails when a file whose hash fits ends in a traceback where it is used."""
    _, _, body = made
    body = json.loads(json.dumps(body))
    block = body["forecast"]["covariance"][HEADLINE]
    if part == "rows":
        body["forecast"]["rows"] = []
    elif part == "some rows":
        body["forecast"]["rows"] = body["forecast"]["rows"][:3]
    elif part == "covariance":
        block["matrix"] = block["matrix"][1:]
    elif part == "negative":
        block["matrix"] = [[-v for v in line] for line in block["matrix"]]
    else:
        body[part] = {"identity": {}, "bridge": {}, "ladder": [1]}[part]
    folder = tmp_path / "forecasts" / "hero"
    folder.mkdir(parents=True)
    (folder / "0001.json").write_text(json.dumps(sealed(body)))
    with pytest.raises(ValueError, match="is not as argosy forecast register writes it"):
        register.newest(tmp_path, "hero")
