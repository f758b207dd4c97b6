"""The printed plan: it fits the terminal, says the important first, and reads sensibly at every scale."""

import datetime
import io

import pytest
from rich.console import Console

from argosy import spec
from argosy.plan import report
from argosy.plan.sheet import plan
from argosy.runs import RECIPES, marin_535b, pocket
from argosy.runs.propose import propose

START = datetime.date(2026, 8, 20)


def printed(width: int, show, found) -> str:
    out = io.StringIO()
    show(found, Console(file=out, width=width, no_color=True))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_the_terminal(name, width):
    """Fails when a line is wider than the terminal, or a figure is cut off."""
    text = printed(width, report.show, plan(RECIPES[name](), price=2, deadline=100, start=START))
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_answers_come_first(width):
    """Fails when time, step, memory, cost and deadline are not in the first lines."""
    lines = printed(width, report.show, plan(marin_535b.run(), price=3, deadline=100, start=START)).splitlines()
    assert lines[1].startswith("marin-535b  535.48B parameters, 22.76B active")
    before = lines[: lines.index(next(line for line in lines if line.startswith("Where a step")))]
    assert [line.split()[0] for line in before if line][-5:] == ["time", "step", "memory", "cost", "deadline"]
    assert len(before) < 14
    text = "\n".join(lines)
    for figure in ("535,477,106,688", "22,762,487,808", "390,251", "0.0032905", "6.0446e-15", "18,005,127,856,128", "390,139"):
        assert figure in text


def test_small_runs_are_told_in_small_units():
    """Fails when a run of minutes is told in days, or of megabytes in GiB."""
    text = printed(80, report.show, plan(pocket.run(), start=START))
    head = text[: text.index("Parameters")]
    assert " min" in head and " ms" in head and "MiB" in head
    assert "days" not in head and "chip-hours" not in head and "transfers" not in head


def test_what_does_not_fit_is_said_at_the_top():
    """Fails when a run that does not fit looks like one that does."""
    text = printed(80, report.show, plan(spec.override(marin_535b.run(), ["compute.chip=h100"]), deadline=10, start=START))
    assert "does not fit" in text[:900] and "late" in text[:900]


def test_a_proposal_fits_the_terminal():
    """Fails when a proposal is wider than the terminal or lacks a neighbour."""
    found = propose("h100", 64, 30, start=START)
    for width in (80, 120):
        text = printed(width, report.show_proposal, found)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        for word in ("smaller", "proposal", "larger", "tokens", "mesh", "ends"):
            assert word in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4 ms"), (1.0, "1.00 s"), (119.0, "119.00 s"), (120.0, "2.0 min"), (7200.0, "2.0 h"), (172_800.0, "2.0 days")],
)
def test_durations_change_unit_where_they_should(seconds, text):
    """Fails when a limit between units moves."""
    assert report.duration(seconds) == text


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0"), (99_999, "99,999"), (100_000, "100.00k"), (22_762_487_808, "22.76B"), (18.0051e12, "18.01T")]
)
def test_counts_change_unit_where_they_should(n, text):
    """Fails when a limit between units moves."""
    assert report.count(n) == text
