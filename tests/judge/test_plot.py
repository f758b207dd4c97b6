"""The picture of a forecast: made from a registered one, with what was measured inside it, and never half written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic
from PIL import Image
from synthetic import HEADLINE, few

from argosy import cli, spec
from argosy.judge import plot, points, register, verdict
from argosy.plan import flops


@pytest.fixture(scope="module")
def voyaged(tmp_path_factory, quick):
    """A store with a ladder, a forecast and the hero at 45%, judged."""
    home = tmp_path_factory.mktemp("plotted")
    hero = synthetic.voyage(home, fault=few)
    register.register(home, "hero")
    synthetic.sail(home, "hero", hero, 0.45, fault=few)
    verdict.judge(home, "hero")
    return home, hero


def test_the_picture_holds_what_was_registered_and_measured(voyaged):
    """Fails when a rung, a band, a point of the hero or the update is missing or at another place than the store says."""
    home, hero = voyaged
    made = plot.picture(home, "hero")
    body = register.newest(home, "hero")
    assert made.metric == HEADLINE and made.unit == "bits/byte"
    assert [c.name for c in made.rungs if c.purpose == "size"] == ["hero-d32", "hero-d48", "hero-d64", "hero-d96"]
    for curve in made.rungs:
        assert curve.share[-1] == 1 and (np.diff(curve.flops) > 0).all()
        np.testing.assert_allclose(curve.law[1:], curve.value[1:], rtol=0.02)  # the law that they were made from fits them
    rows = [row for row in body["forecast"]["rows"] if row["metric"] == HEADLINE and row["mean"] is not None]
    np.testing.assert_allclose(made.band["hi90"], [row["hi90"] for row in rows])
    np.testing.assert_allclose(made.band["flops"], [row["step"] * flops.train_step(hero, readout=False) for row in rows])
    total = spec.steps(hero)
    expected = [step for step in points.evaluation_steps(hero) if 0.05 * total < step <= round(0.45 * total)]
    np.testing.assert_allclose(made.hero.share * total, expected)
    assert made.updated["share"][0] > 0.45 and made.updated["share"][-1] == 1
    assert body["sha256"][:12] in made.below and "before the run's first update" in made.below
    assert made.title.startswith(f"hero: {plot.page(home, 'hero')['verdict']['verdict']}")


def test_a_png_is_made_and_is_not_blank(voyaged, tmp_path, capsys):
    """Fails when the command writes nothing, a blank or tiny picture, or leaves its temporary file."""
    out = tmp_path / "forecast.png"
    cli.main(["forecast", "plot", "hero", "--home", str(voyaged[0]), "--out", str(out), "--metric", "grad/norm/total"])
    assert "wrote" in capsys.readouterr().out
    with Image.open(out) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[0] > 700 and pixels.shape[1] > 1500
    left, right = np.array_split(pixels, 2, axis=1)
    for half in (left, right):  # each panel is drawn
        assert 0.02 < (half < 250).any(axis=2).mean() < 0.6
        assert len(np.unique(half.reshape(-1, 3), axis=0)) > 50
    assert [path.name for path in tmp_path.iterdir()] == ["forecast.png"]


def test_json_is_what_the_page_draws(voyaged, tmp_path, capsys, monkeypatch):
    """Fails when --json is anything but the page's file, or makes a picture that nobody asked for."""
    monkeypatch.chdir(tmp_path)
    cli.main(["forecast", "plot", "hero", "--home", str(voyaged[0]), "--json"])
    told = json.loads(capsys.readouterr().out)
    written = json.loads((voyaged[0] / "forecasts" / "hero" / "page.json").read_text())
    assert {key: told[key] for key in written} == written
    assert told["headline"] == HEADLINE and told["metrics"][HEADLINE]["panel"] == "heldout"
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_sentences(voyaged, tmp_path, capsys):
    """Fails when an unknown run or metric, a wrong ending or a missing folder gives a traceback or half a file."""
    home = str(voyaged[0])
    for words, said, status in (
        (["her", "--home", home], "no forecast of 'her' is registered", 2),
        (["hero", "--home", home, "--metric", "grad/norm/totl"], "nearest: grad/norm/total", 2),
        (["hero", "--home", home, "--out", str(tmp_path / "a.txt")], "must end in .png, .pdf, .svg", 2),
        (["hero", "--home", home, "--out", ""], "must end in .png, .pdf, .svg; nearest legal forecast.png", 2),
        (["hero", "--home", home, "--out", str(tmp_path / "none" / "a.png")], "none", 1),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["forecast", "plot", *words])
        told = capsys.readouterr()
        assert end.value.code == status and said in told.err and not told.out, words
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_is_missing_is_made_again(voyaged, tmp_path):
    """Fails when a registered forecast cannot be drawn because nothing was judged since."""
    shutil.copytree(voyaged[0] / "forecasts", tmp_path / "forecasts")
    (tmp_path / "forecasts" / "hero" / "page.json").unlink()
    made = plot.picture(tmp_path, "hero")
    assert "not judged yet" in made.title and not len(made.hero.share) and made.updated == {}
    assert plot.draw(made).axes


def test_matplotlib_is_imported_by_the_picture_alone():
    """Fails when another command waits for Matplotlib, or the picture for JAX."""
    script = "import sys; import argosy.cli, argosy.judge.plot; sys.exit('matplotlib' in sys.modules or 'jax' in sys.modules)"
    source = str(Path(plot.__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": source}).returncode == 0
