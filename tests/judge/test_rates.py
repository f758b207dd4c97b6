"""`argosy scaling fit` on sweeps in a store: a known rule comes back, and what cannot share a rule is refused."""

import io
import json
import math

import pytest
from rich.console import Console

from argosy import cli, spec
from argosy.judge import rates, sweeps
from argosy.plan import scaling
from argosy.runs import pocket
from argosy.track import store

C, A, B = 0.1, 0.33, 0.25  # the rule that the store is written with


def finish(home, name, run, loss):
    """A finished run as the store keeps it, with this one evaluation."""
    store.create(home / "runs" / name, spec.to_json(run), {"argosy": "0.1.0"})
    with store.open_writer(home / "runs" / name, 0) as writer:
        writer.lineage("corpus", 0, name=run.data.corpus, checksum="5f1d77c2", ledger={})
        writer.record(
            spec.steps(run), {"train/loss": 3.0, "eval_whole/stdlib/macro_bpb": loss, "eval_dropless/stdlib/macro_bpb": 9.0}
        )


def swept(home, width, tokens, *settings, factors="0.5,1,2,4", name="", seeds=2):
    """A sweep whose losses have their lowest at the known rule's learning rate."""
    base = spec.override(pocket.rung(width), [f"optim.horizon_tokens={tokens}", *settings])
    for member in sweeps.make(base, name or f"pocket-d{width}-{tokens}", [f"optim.lr_scale={factors}"], seeds).members:
        best = C * tokens**-A * width**-B * math.sqrt(spec.tokens_per_step(base))
        away = math.log(scaling.rates(member.run).adam_lr / best)
        finish(home, member.name, member.run, 2.0 * math.exp(0.02 * away**2 + 0.004 * member.seed))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Sweeps of two widths and two horizons."""
    home = tmp_path_factory.mktemp("home")
    for width in (64, 96):
        for tokens in (1_000_000, 4_000_000):
            swept(home, width, tokens)
    return home


@pytest.fixture
def small(tmp_path):
    """A sweep of one width."""
    swept(tmp_path, 64, 1_000_000, factors="1,2,4")
    return tmp_path


def test_a_known_rule_comes_back_from_the_store(home, capsys):
    """Fails when the rule of the sweeps in a store is not the one that their losses were made with, when its range is not
    what was swept, or when the terminal leaves out what the JSON says."""
    cli.main(["scaling", "fit", "pocket", "--home", str(home), "--json"])
    found = json.loads(capsys.readouterr().out)
    made = found["fit"]
    assert made["coefficient"] == pytest.approx(C, rel=1e-5)
    assert (made["tokens_power"], made["width_power"]) == (pytest.approx(A), pytest.approx(B))
    assert (made["widths"], made["tokens"], made["experts"]) == ([64, 96], [1_000_000, 4_000_000], [32, 4])
    assert (found["runs"], found["fixed"], found["rule_in_use"]) == (32, {}, "marin_2026_08")
    assert "all held-out text" in made["source"]
    assert set(made) == set(vars(scaling.FITS["marin_2026_08"]))
    for cell in found["cells"]:
        best = C * cell["tokens"] ** -A * cell["width"] ** -B * math.sqrt(cell["tokens_per_step"])
        assert cell["adam_lr"] == pytest.approx(best, rel=1e-6) and cell["runs"] == 8
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(rates.table(found))
    text = console.export_text()
    assert "0.3300" in text and "64 to 96" in text and "tokens_power=0.33" in text and max(map(len, text.splitlines())) <= 130


def test_one_size_leaves_the_exponents_as_they_are(home):
    """Fails when exponents are made of one cell."""
    found = rates.fit(["pocket-d64-1000000"], home)
    rule = scaling.FITS["marin_2026_08"]
    assert found["fixed"] == {"tokens_power": rule.tokens_power, "width_power": rule.width_power}


def test_edges_caps_and_unfinished_runs_are_named(small):
    """Fails when a cell that says nothing is fitted, or left out without a word."""
    swept(small, 32, 1_000_000, factors="8,16,32", name="pocket-edge", seeds=1)
    swept(small, 16, 100_000, "data.batch_seqs=64", name="pocket-cap", factors="1,2", seeds=1)
    half = sweeps.make(pocket.rung(48), "pocket-half", ["optim.lr_scale=1,2"], 1).members[0]
    store.create(small / "runs" / half.name, spec.to_json(half.run), {})
    found = rates.fit(["pocket"], small)
    assert any("pocket-half-sweep-lr_scale-1-s0 is not finished" in note for note in found["notes"])
    assert any("width 16" in note and "cap of 0.05" in note for note in found["notes"])
    assert next(cell["reason"] for cell in found["cells"] if cell["width"] == 32).startswith(
        "its best learning rate is the lowest"
    )
    assert found["fit"]["widths"] == (64, 64)
    with pytest.raises(ValueError, match="lowest that was tried"):
        rates.fit(["pocket-edge"], small)


@pytest.mark.parametrize(
    "settings,what",
    [
        (["moe.experts=16"], "moe.experts is"),
        (["optim.warmup_frac=0.1"], "optim.warmup_frac is"),
        (["data.seq_len=128"], "data.seq_len is"),
        (["optim.rule=muon"], "optim.rule is"),
        (["model.heads=8", "model.head_width=8"], None),
    ],
)
def test_what_cannot_share_a_rule_is_refused(small, settings, what):
    """Fails when sweeps under other settings go into one rule, or into one cell."""
    swept(small, 64, 1_000_000, *settings, name="pocket-other", factors="1,2", seeds=1)
    with pytest.raises(ValueError, match=what or "of one cell; fit them apart"):
        rates.fit(["pocket"], small)


def test_unknown_names_are_told_the_nearest(home):
    with pytest.raises(ValueError, match="nearest: pocket-d64-1000000"):
        rates.fit(["pocket-d64-100000"], home)
