"""The update of a forecast against formulas written out and scipy's normal distribution: fails when conditioning, the evidence for a
shift or the rules of the words are wrong, when one bad evaluation moves anything, or when a lasting shift is missed."""

import math

import numpy as np
import pytest
from scipy import stats

from argosy.forecast import follow

NOISE = 0.002


def registered(noise: float = NOISE, rows: int = 40) -> follow.Registered:
    """A forecast of a loss that falls from 2.4 to 2, with 90% bands of about 1.5% and a covariance at seven rows."""
    g = np.linspace(0.05, 1, rows)
    mean = np.log(2.0 + 0.4 * (1 - g) ** 1.5)
    knots = g[np.unique(np.linspace(0, rows - 1, 7).round().astype(int))]
    slope = np.log(knots) - np.log(knots).mean()
    matrix = 0.008**2 + 0.002**2 * np.outer(slope, slope)
    half = 1.645 * math.hypot(0.0085, noise)
    return follow.Registered(g, mean, mean - half, mean + half, knots, matrix, noise)


def curve(known: follow.Registered, rng: np.random.Generator, common: float = 0.004) -> np.ndarray:
    """An undisturbed run of it, with noise of the scale that its Student-t has."""
    return np.exp(known.mean + common + known.noise / math.sqrt(2) * rng.standard_t(4, size=len(known.mean)))


def prior(known: follow.Registered, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Covariance of two lists of places, written out: the registered one read linearly in log, and a slow error of 0.23%."""
    out = np.zeros((len(a), len(b)))
    lines = [np.interp(np.log(b), np.log(known.knots), line) for line in known.covariance]
    for j in range(len(b)):
        column = [line[j] for line in lines]
        for i in range(len(a)):
            d = math.log(a[i]) - math.log(b[j])
            out[i, j] = np.interp(math.log(a[i]), np.log(known.knots), column) + 0.0023**2 * math.exp(-d * d / 2)
    return out


def test_the_update_is_gaussian_conditioning():
    """Against the formula with covariances written out; values so close to each other that all count whole."""
    known = registered()
    g = np.array([0.06, 0.1, 0.17, 0.25])  # too few to say anything of the noise: the registered one counts
    shift = np.array([0.0030, 0.0032, 0.0035, 0.0034])
    value = np.exp(np.interp(np.log(g), np.log(known.progress), known.mean) + shift)
    found = follow.follow(known, g, value)
    np.testing.assert_allclose(found.residual, shift, atol=1e-12)
    assert found.steps == () and (found.weight == 1).all()
    inner = prior(known, g, g) + NOISE**2 / 2 * np.eye(4)  # Student t of four degrees: half the variance near the middle
    cross, own = prior(known, known.progress, g), prior(known, known.progress, known.progress)
    np.testing.assert_allclose(found.mean, known.mean + cross @ np.linalg.solve(inner, shift), rtol=1e-9)
    spread = np.sqrt(np.diag(own - cross @ np.linalg.solve(inner, cross.T)))
    np.testing.assert_allclose(found.spread, spread, rtol=1e-6)
    whole = stats.multivariate_normal(np.zeros(4), inner).logpdf(shift)
    scale = np.log(np.diag(np.linalg.cholesky(inner))).sum()
    assert math.isclose(stats.norm.logpdf(found.innovation).sum() - scale, whole, rel_tol=1e-9)


def test_innovations_are_errors_of_predicting_from_what_came_before():
    known, rng = registered(), np.random.default_rng(0)
    value = curve(known, rng)[:12]
    found = follow.follow(known, known.progress[:12], value)
    scale = follow.scale_of(known, found.residual)
    k = prior(known, known.progress[:12], known.progress[:12]) + np.diag(scale**2 / found.weight)
    for n in (1, 5, 11):
        line = np.linalg.solve(k[:n, :n], k[:n, n])
        error = found.residual[n] - line @ found.residual[:n]
        assert math.isclose(found.innovation[n], error / math.sqrt(k[n, n] - line @ k[:n, n]), rel_tol=1e-6)


def test_before_the_run_and_far_from_it_the_forecast_is_the_registered_one():
    known = registered()
    found = follow.follow(known, np.zeros(0), np.zeros(0))
    np.testing.assert_array_equal(found.mean, known.mean)
    assert follow.read(known, found, 1) == follow.Reading("on track", None, "")


def test_the_noise_is_between_what_was_registered_and_what_the_curve_shows():
    known, rng = registered(), np.random.default_rng(7)
    for scale in (0.0005, 0.005):
        found = follow.scale_of(known, scale * rng.normal(size=400))
        assert abs(math.log(found / scale)) < 0.3 and abs(math.log(found / scale)) < abs(math.log(NOISE / math.sqrt(2) / scale))
    assert follow.scale_of(known, 0.1 * rng.normal(size=4)) == NOISE / math.sqrt(2)


def test_evidence_is_the_ratio_of_two_normal_densities():
    rng = np.random.default_rng(1)
    raw = rng.normal(size=(9, 9))
    k, r, size = raw @ raw.T + np.eye(9), rng.normal(size=9), 0.7
    found = follow.evidence(np.linalg.inv(k), r, size)
    for begin in range(9):
        stair = (np.arange(9) >= begin).astype(float)
        ratio = max(stats.multivariate_normal(sign * size * stair, k).logpdf(r) for sign in (-1, 1))
        ratio -= stats.multivariate_normal(np.zeros(9), k).logpdf(r)
        assert math.isclose(found[begin], ratio, rel_tol=1e-8, abs_tol=1e-10)


@pytest.mark.parametrize("at", [4, 15, 29])
def test_one_bad_evaluation_moves_nothing(at):
    known = registered()
    value = curve(known, np.random.default_rng(2))[:30]
    calm = follow.follow(known, known.progress[:30], value)
    bad = value.copy()
    bad[at] *= 1.08
    found = follow.follow(known, known.progress[:30], bad)
    assert found.steps == () and follow.read(known, found, 1).word == "on track"
    assert found.weight[at] < 0.01
    assert abs(found.mean[-1] - calm.mean[-1]) < 0.5 * calm.spread[-1]


@pytest.mark.parametrize("size", [0.02, -0.02, 0.3])
def test_a_planted_shift_is_found_where_it_began(size):
    known = registered()
    value = curve(known, np.random.default_rng(3))[:26]
    value[20:] *= math.exp(size)
    found = follow.follow(known, known.progress[:26], value)
    assert [s.begins for s in found.steps] == [20]
    assert abs(found.shift - size) < max(4 * found.shift_spread, 0.05 * abs(size))
    assert 0 < found.shift_spread < 0.003
    reading = follow.read(known, found, 1)
    assert reading.since == 20 and reading.word == ("ahead" if size < 0 else "off")
    assert follow.read(known, found, -1).word == ("off" if size < 0 else "ahead")
    later = follow.follow(known, known.progress[:26], value).mean[-1] - known.mean[-1]
    assert abs(later - 0.004 - size) < 0.006 + 0.05 * abs(size)  # the end is forecast with the shift in it


def test_what_came_back_is_no_shift_any_more():
    known = registered()
    value = curve(known, np.random.default_rng(4), common=0.0)
    value[12:18] *= 1.02
    middle = follow.follow(known, known.progress[:18], value[:18])
    assert follow.read(known, middle, 1).word in ("behind", "off")
    found = follow.follow(known, known.progress[:36], value[:36])
    assert [s.begins for s in found.steps] == [12, 18] and abs(found.shift) < 0.002
    assert follow.read(known, found, 1).word == "on track"


def test_a_rise_is_told_though_an_earlier_fall_hides_it_and_then_only_while_it_is_fresh():
    """-1% from 40% of the run and +1% from 60%: the sum is nothing, the rise is told for a tenth of the run; a fall is not."""
    known = registered(rows=120)
    value = curve(known, np.random.default_rng(8), common=0.0)
    first, then = (int(np.searchsorted(known.progress, p)) for p in (0.4, 0.6))
    for sign, word in ((-1, "behind"), (1, "on track")):
        moved = value * np.where((np.arange(120) >= first) & (np.arange(120) < then), np.exp(0.01 * sign), 1.0)
        found = follow.follow(known, known.progress[: then + 7], moved[: then + 7])
        reading = follow.read(known, found, 1)
        assert abs(found.shift) < 0.003 and reading.word == word
        if word == "behind":
            assert abs(reading.since - then) <= 1 and abs(reading.shift - 0.01) < 0.003
        late = then + math.ceil(0.11 / (known.progress[1] - known.progress[0]))
        assert follow.read(known, follow.follow(known, known.progress[:late], moved[:late]), 1).word == "on track"


def test_what_a_run_does_first_is_its_level_and_a_step_is_told_once_it_lasted():
    known = registered(rows=120)
    value = curve(known, np.random.default_rng(9), common=0.0)
    early = value * np.where(np.arange(120) >= 4, np.exp(0.008), 1.0)  # from 8% of the run on; the first row is at 5%
    assert follow.follow(known, known.progress[:40], early[:40]).steps == ()
    value[50:] *= np.exp(0.008)
    told = [follow.read(known, follow.follow(known, known.progress[:n], value[:n]), 1).word for n in range(51, 58)]
    lasted = known.progress[50:57] - known.progress[48]  # its first may be placed two too early
    assert all(word == "on track" for word, share in zip(told, lasted, strict=True) if share < 0.038)
    assert told[-2:] == ["behind", "behind"]


def test_units_do_not_matter():
    known = registered()
    value = curve(known, np.random.default_rng(5))[:20]
    scaled = known._replace(**{name: getattr(known, name) + math.log(1.44) for name in ("mean", "low", "high")})
    one, other = follow.follow(known, known.progress[:20], value), follow.follow(scaled, known.progress[:20], 1.44 * value)
    for name in ("residual", "widths", "innovation", "spread"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), atol=1e-9)
    np.testing.assert_allclose(one.mean + math.log(1.44), other.mean)


def test_words_by_the_band():
    """Beyond the edge twice: behind or ahead; beyond it by half a band twice: off; once is nothing; without a good side off alone."""
    known = registered()
    empty = follow.follow(known, np.zeros(0), np.zeros(0))

    def word(widths: list[float], better: int = 1) -> tuple[str, int | None]:
        reading = follow.read(known, empty._replace(widths=np.array(widths)), better)
        return reading.word, reading.since

    assert word([0, 0, 1.5]) == ("on track", None)
    assert word([0, 0.2, 1.5, 0]) == ("on track", None)
    assert word([0, 0.2, 0.4]) == ("behind", 1)
    assert word([0, 0.2, 1.1, 3.0]) == ("off", 2)
    assert word([-0.2, -1.4, -3.0]) == ("ahead", 0)
    assert word([-0.2, -1.4, -3.0], -1) == ("off", 1)
    assert word([0.2, 1.4, 3.0], -1) == ("ahead", 0)
    assert word([0.2, 0.4], 0) == ("on track", None)
    assert word([1.2, -1.4], 0) == ("off", 0)


def test_evaluations_that_cannot_be_followed_are_refused():
    known = registered()
    with pytest.raises(ValueError, match=r"4\.00% of the run comes before the first forecast row, 5\.00%"):
        follow.follow(known, np.array([0.04]), np.array([2.0]))
    with pytest.raises(ValueError, match="in order of progress"):
        follow.follow(known, np.array([0.2, 0.1]), np.array([2.0, 2.0]))
    with pytest.raises(ValueError, match="finite"):
        follow.follow(known, np.array([0.1, 0.2]), np.array([2.0, math.nan]))
    with pytest.raises(ValueError, match="1 places and 2 values"):
        follow.follow(known, np.array([0.1]), np.array([2.0, 2.0]))


def test_a_long_run_is_thinned_and_keeps_its_newest():
    kept = follow.thinned(1000)
    assert len(kept) == 256 and kept[0] == 0 and (np.diff(kept) > 0).all() and kept[-64:].tolist() == list(range(936, 1000))
    assert follow.thinned(256).tolist() == list(range(256))


def test_calm_runs_are_not_called_off_and_an_excess_is_seen():
    """The bench in small, at 120 evaluations: no calm curve is off, 0.5% is seen within seven evaluations in at least 15 of 20."""
    known, rng = registered(rows=120), np.random.default_rng(6)
    factor = np.linalg.cholesky(prior(known, known.progress, known.progress) + 1e-10 * np.eye(120))
    calm, seen = [], []
    for _ in range(20):
        value = curve(known, rng, 0.0) * np.exp(factor @ rng.normal(size=120))
        for n in range(10, 121, 22):
            calm.append(follow.read(known, follow.follow(known, known.progress[:n], value[:n]), 1).word)
        at = int(rng.integers(12, 100))
        value[at:] *= 1.005
        found = follow.follow(known, known.progress[: at + 7], value[: at + 7])
        seen.append(follow.read(known, found, 1).word in ("behind", "off"))
    assert "off" not in calm and calm.count("on track") >= 0.7 * len(calm)
    assert sum(seen) >= 15
