"""The plan turned round: what it proposes fits, its neighbours frame it, and too little is refused with numbers."""

import datetime
import functools
import json
import re

import pytest

from argosy import spec
from argosy.plan import cost, memory
from argosy.runs import marin_535b
from argosy.runs.propose import WIDTHS
from argosy.runs.propose import propose as search

START = datetime.date(2026, 8, 20)
propose = functools.cache(search)
ASKED = [("h100", 512, 90.0), ("gb200", 704, 100.0), ("a100", 8, 30.0), ("v6e", 256, 60.0)]


def test_the_references_own_question_gives_the_reference():
    """Fails when 704 GB200 for 100 days at the reference's goodput do not give its run, in its launch form or with the
    float32 weights on the device that it changed to later."""
    found = propose("gb200", 704, 100, goodput=0.86, start=START)["proposal"]
    run, reference = spec.from_json(found["run"]), marin_535b.run()
    differing = spec.difference(run, reference)
    assert set(differing) <= {"compute.accumulate", "compute.params", "compute.masters"}, differing
    assert found["chips_used"] == 704


@pytest.mark.parametrize(("chip", "chips", "days"), ASKED)
def test_a_proposal_fits_time_and_memory(chip, chips, days):
    """Fails when a proposal, planned again, is late or too large, or its run is not complete."""
    found = propose(chip, chips, days, start=START)
    json.dumps(found, allow_nan=False)
    run = spec.from_json(found["proposal"]["run"])
    assert memory.plan(run)["fits"]
    assert cost.time(run, 0.83)["days"] <= days
    assert spec.devices(run) == found["proposal"]["chips_used"] <= chips
    assert run.compute.chip == chip
    assert run.optim.horizon_tokens == pytest.approx(791 * found["proposal"]["plan"]["params"]["active"])
    assert found["proposal"]["plan"]["time"]["end"] <= (START + datetime.timedelta(days=days)).isoformat()


@pytest.mark.parametrize(("chip", "chips", "days"), ASKED)
def test_neighbours_frame_the_proposal(chip, chips, days):
    """Fails when the larger neighbour would have fitted after all, or the smaller one does not."""
    found = propose(chip, chips, days, start=START)
    widths = [found[name]["plan"]["model"]["width"] for name in ("smaller", "proposal", "larger")]
    at = WIDTHS.index(widths[1])
    assert widths == list(WIDTHS[at - 1 : at + 2])
    assert found["smaller"]["plan"]["time"]["days"] <= days and found["smaller"]["plan"]["memory"]["fits"]
    larger = found["larger"]["plan"]
    assert larger["time"]["days"] > days or not larger["memory"]["fits"]
    assert re.search("too many|does not fit", found["larger"]["verdict"])


def test_more_chips_or_days_never_propose_less():
    """Fails when four times the chips, or the days, give a smaller model."""

    def width(chips: int, days: float) -> int:
        return propose("a100", chips, days, start=START)["proposal"]["plan"]["model"]["width"]

    assert width(8, 30.0) < width(32, 30.0) < width(32, 120.0)


def test_leaving_the_recipes_range_is_said():
    """Fails when a proposal beyond the reference run does not say so."""
    notes = " ".join(propose("b200", 4096, 120, start=START)["proposal"]["notes"])
    assert "the recipe was run from 768 to 6,144" in notes
    assert "depth rule" in notes and "largest batch is 46,137,344" in notes and "scale-up domain" in notes


def test_idle_chips_are_said():
    """Fails when chips that no mesh uses are passed over."""
    found = propose("h100", 67, 30, start=START)["proposal"]
    assert found["chips_used"] < 67
    assert any("stay idle" in note for note in found["notes"])


def test_too_little_names_what_would_do():
    """Fails when an impossible wish is answered with a traceback, a proposal, or no way out."""
    with pytest.raises(
        ValueError, match=r"1 x cpu for 30 days: the recipe's smallest model \(width 512, .* nearest: [\d,]+ days"
    ):
        propose("cpu", 1, 30, start=START)
    with pytest.raises(ValueError, match=r"nearest: 2 days, or about 2 chips"):
        propose("h100", 1, 1, start=START)


def test_the_days_of_a_refusal_are_enough():
    """Fails when the nearest legal days of a refusal are refused themselves."""
    with pytest.raises(ValueError) as refused:
        propose("a100", 1, 1, start=START)
    days = int(re.search(r"nearest: ([\d,]+) days", str(refused.value))[1].replace(",", ""))  # type: ignore[index]
    assert propose("a100", 1, days, start=START)["proposal"]["plan"]["model"]["width"] == 512


@pytest.mark.parametrize(("chips", "days"), [(0, 10.0), (-4, 10.0), (8, 0.0), (8, -1.0), (8, float("nan")), (8, float("inf"))])
def test_bad_numbers_are_refused(chips, days):
    """Fails when a wish without chips or days is searched."""
    with pytest.raises(ValueError, match="must be"):
        propose("h100", chips, days, start=START)


def test_an_unknown_chip_names_three():
    """Fails when a mistyped chip is not answered with its nearest names."""
    with pytest.raises(ValueError, match="unknown chip 'gb300'; nearest: gb200"):
        propose("gb300", 64, 10, start=START)
