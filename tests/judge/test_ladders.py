"""A ladder on disk: kept for life once it has begun, read back whole, and how far its rungs are."""

import json
import os
from dataclasses import replace

import pytest

from argosy import spec
from argosy.judge import ladders
from argosy.runs import pocket
from argosy.track import store

HERO, RUNGS = pocket.run(), pocket.rungs()


def begin(home, rung, updates=0, bpb=None, name="pocket"):
    """A rung's run as training leaves it after so many updates."""
    folder = home / "runs" / f"{name}-{rung.name}"
    store.create(folder, spec.to_json(rung.run), {})
    with store.open_writer(folder, 0) as writer:
        for step in range(1, updates + 1, max(1, updates - 1)):
            writer.record(step, {"train/loss": 3.0})
        if bpb is not None:
            writer.record(updates, {"eval_dropless/stdlib/macro_bpb": bpb})


def test_what_is_saved_is_what_is_loaded(tmp_path):
    path = ladders.save(tmp_path, "pocket", HERO, RUNGS)
    assert path == tmp_path / "ladders" / "pocket.json"
    body = ladders.load(tmp_path, "pocket")
    assert (body["format"], body["name"]) == (1, "pocket")
    assert spec.from_json(body["hero"]) == HERO
    assert [(e["rung"], spec.from_json(e["run"]), e["purpose"]) for e in body["rungs"]] == [tuple(r) for r in RUNGS]
    assert [entry["name"] for entry in body["rungs"]] == [f"pocket-{rung.name}" for rung in RUNGS]
    assert os.listdir(tmp_path / "ladders") == ["pocket.json"]


def test_saved_again_with_the_same_values_it_is_left_alone(tmp_path):
    before = ladders.save(tmp_path, "pocket", HERO, RUNGS).read_bytes()
    begin(tmp_path, RUNGS[0])
    assert ladders.save(tmp_path, "pocket", HERO, RUNGS).read_bytes() == before


def test_other_values_replace_it_until_a_rung_has_begun(tmp_path):
    """Fails when a plan cannot be changed, or a ladder under way can."""
    ladders.save(tmp_path, "pocket", HERO, RUNGS)
    hero = replace(HERO, optim=replace(HERO.optim, lr_scale=1.0))
    path = ladders.save(tmp_path, "pocket", hero, pocket.rungs(hero)[:4])
    begin(tmp_path, RUNGS[1])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="other values") as refused:
        ladders.save(tmp_path, "pocket", HERO, RUNGS)
    for words in (
        "hero optim.lr_scale 1.0 -> 2.0",
        "rung d32-seed1 is new",
        "rung d32 optim.lr_scale 1.0 -> 2.0",
        "pocket-d48 has begun",
        "--as pocket-2",
    ):
        assert words in str(refused.value)
    assert path.read_bytes() == before
    assert ladders.save(tmp_path, "pocket-2", HERO, RUNGS).is_file()


def test_a_rung_left_out_is_named(tmp_path):
    ladders.save(tmp_path, "pocket", HERO, RUNGS)
    begin(tmp_path, RUNGS[0])
    with pytest.raises(ValueError, match="rung d32-seed1 is left out"):
        ladders.save(tmp_path, "pocket", HERO, RUNGS[:-1])


def test_a_ladder_that_there_is_not_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"no ladder of 'pocket'.*argosy ladder pocket --run"):
        ladders.load(tmp_path, "pocket")
    ladders.save(tmp_path, "pocket", HERO, RUNGS)
    with pytest.raises(ValueError, match=r"nearest: pocket"):
        ladders.state(tmp_path, "poket")


@pytest.mark.parametrize("damage", ["", "{", "[]", "[" * 100_000, '{"format": 2}', "no hero", "no run", "elsewhere", "twice"])
def test_a_damaged_file_is_said_and_left(tmp_path, damage):
    path = ladders.save(tmp_path, "pocket", HERO, RUNGS)
    body = json.loads(path.read_text())
    if damage == "no hero":
        del body["hero"]
        damage = json.dumps(body)
    elif damage == "no run":
        del body["rungs"][1]["run"]["model"]["width"]
        damage = json.dumps(body)
    elif damage == "elsewhere":
        body["rungs"][1] |= {"name": "pocket-../../other", "rung": "../../other"}
        damage = json.dumps(body)
    elif damage == "twice":
        body["rungs"].append(body["rungs"][1])
        damage = json.dumps(body)
    path.write_text(damage)
    with pytest.raises(ValueError, match=r"pocket\.json is not what was written"):
        ladders.load(tmp_path, "pocket")
    with pytest.raises(ValueError, match="is not what was written"):
        ladders.save(tmp_path, "pocket", HERO, RUNGS)
    assert path.read_text() == damage


def test_a_disk_that_refuses_leaves_the_old_ladder(tmp_path, monkeypatch):
    before = ladders.save(tmp_path, "pocket", HERO, RUNGS).read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        ladders.save(tmp_path, "pocket", HERO, RUNGS[:4])
    assert (tmp_path / "ladders" / "pocket.json").read_bytes() == before


def test_how_far_each_rung_is(tmp_path):
    """Not begun, under way, finished: updates, whole runs and last bits per byte by rung."""
    ladders.save(tmp_path, "pocket", HERO, RUNGS)
    begin(tmp_path, RUNGS[0], updates=1024, bpb=2.5)
    begin(tmp_path, RUNGS[1], updates=20)
    begin(tmp_path, RUNGS[2])
    found = ladders.state(tmp_path, "pocket")
    assert [row["rung"] for row in found] == [rung.name for rung in RUNGS]
    assert [(row["updates"], row["steps"], row["finished"], row["macro_bpb"]) for row in found[:4]] == [
        (1024, 1024, True, 2.5),
        (20, 1024, False, None),
        (0, 1024, False, None),
        (0, 1024, False, None),
    ]
    assert found[0]["macro_bpb_at"] == 1024
