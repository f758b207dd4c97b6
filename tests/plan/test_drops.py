"""Expected drops: the published figures, simulations written independently of ours, and alpha found again in logged loads."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy import spec
from argosy.plan import drops
from argosy.plan.drops import Capacity, Shape
from argosy.plan.sheet import plan
from argosy.runs import marin_535b, pocket

HERO = Shape(senders=64, experts=384, chosen=8, tokens=65_536, documents=16)


def at(shape, documents):
    return Shape(shape.senders, shape.experts, shape.chosen, shape.tokens, documents)


# ---- the published case ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "capacity", "documents", "side", "points"),
    [
        ("cell", Capacity(1.33, 1.33, 1), 16, "sender", 7.1),
        ("pooled_wave", Capacity(1.15, 1.15, 3), 16, "sender", 2.3),
        ("pooled_wave", Capacity(1.15, 1.15, 3), 1, "sender", 22.2),
        ("ragged", Capacity(1.15, 1.15, 2), 1, "receiver", 0.8),
        ("pooled_wave", Capacity(1.15, 1.15, 3), 16, "receiver", 0.0),
        ("ragged", Capacity(1.0, 1.0, 2), 16, "receiver", 1.3),
    ],
)
def test_the_one_parameter_case(transport, capacity, documents, side, points):
    """Fails when a figure of expert_parallel A4 is off by more than half a point, or its stated error is larger."""
    found = drops.expected(at(HERO, documents), transport, capacity)
    assert 100 * getattr(found, side) == pytest.approx(points, abs=0.5)
    assert 100 * getattr(found, side + "_error") < 0.2


def test_capacity_at_the_reference_shape():
    """P = 3,141 rows per sender, destination and wave; R = 33,497 per expert and wave (issue 3)."""
    assignments = 65_536 * 8
    assert drops.capacity_rows(1.15, assignments / 64, 3, assignments) * assignments / 64 / 3 == 3_141
    assert drops.capacity_rows(1.15, assignments / 6, 3, 64 * assignments) * assignments / 6 / 3 == 33_497


# ---- the same model, written again ----------------------------------------------------------------


def plain_shares(rng, experts, chosen, alpha):
    """One document's shares of the experts, none above 1/K."""
    p = rng.dirichlet(np.full(experts, alpha))
    for _ in range(20):
        p = np.minimum(p, 1 / chosen)
        p = p / p.sum()
    return np.minimum(p, 1 / chosen)


def plain_tokens(rng, p, chosen, count):
    """`count` tokens' experts [count, K], all different: systematic sampling along a shuffled circle, expert e with K p_e."""
    found = np.zeros((count, chosen), int)
    for t in range(count):
        order = rng.permutation(len(p))
        ends = np.cumsum(chosen * p[order])
        found[t] = order[np.minimum(np.searchsorted(ends, rng.random() + np.arange(chosen)), len(p) - 1)]
    return found


def plain_exchange(shards, experts, capacity):
    """Sender and receiver drops of pooled waves, assignment by assignment (expert_parallel A1), as shares of all."""
    ranks, local, waves = len(shards), experts // len(shards), capacity.waves
    total = sum(shard.size for shard in shards)
    pool = math.ceil(capacity.sender * shards[0].size / (ranks * waves))
    rows = math.ceil(capacity.receiver * shards[0].size / (local * waves))
    lost_at_sender, arrived = 0, np.zeros((waves, experts), int)
    for shard in shards:
        seen = np.zeros(ranks, int)
        for e in shard.reshape(-1):
            wave, slot = seen[e // local] % waves, seen[e // local] // waves
            seen[e // local] += 1
            if slot < pool:
                arrived[wave, e] += 1
            else:
                lost_at_sender += 1
    return lost_at_sender / total, np.maximum(0, arrived - rows).sum() / total


@pytest.mark.parametrize(
    ("shape", "capacity", "alpha", "exchanges"),
    [
        (Shape(4, 16, 2, 512, 2), Capacity(1.3, 1.1, 2), 0.5, 24),
        (Shape(2, 16, 4, 256, 4), Capacity(1.1, 1.05, 1), 1.0, 40),
        (Shape(4, 16, 2, 128, 4), Capacity(1.15, 1.15, 1), 100.0, 40),
    ],
)
def test_pooled_waves_token_by_token(shape, capacity, alpha, exchanges):
    """Fails when shares, noise of rows, pools or capacities are not those of tokens that are really sent."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(exchanges):
        shards = []
        for _ in range(shape.senders):
            documents = [plain_shares(rng, shape.experts, shape.chosen, alpha) for _ in range(shape.documents)]
            each = shape.tokens // shape.documents
            shards.append(np.concatenate([plain_tokens(rng, p, shape.chosen, each) for p in documents]))
        found.append(plain_exchange(shards, shape.experts, capacity))
    mean, error = np.mean(found, 0), np.std(found, 0, ddof=1) / math.sqrt(exchanges)
    model = drops.expected(shape, "pooled_wave", capacity, alpha)
    for side, (value, spread) in zip(("sender", "receiver"), zip(mean, error, strict=True), strict=True):
        print(f"{side}: {value:.2%} +- {spread:.2%} by tokens, {getattr(model, side):.2%} by the model")
        assert abs(getattr(model, side) - value) < 3 * spread + 0.001


def test_noise_of_rows_matters_where_rows_are_few():
    """Fails when 64 rows per cell are treated as a fluid: even shares then drop nothing, real rows do."""
    few, many = (Shape(1, 32, 4, tokens, 8) for tokens in (512, 512 * 400))
    small, large = (drops.expected(one, "local", Capacity(1.15, 1.15, 1), 1000.0).receiver for one in (few, many))
    # a cell's rows are normal about their mean with variance K/E (1 - K/E) T
    cap, mean, sd = math.ceil(1.15 * 64), 64.0, math.sqrt(512 * 0.125 * 0.875)
    z = (cap - mean) / sd
    expected = sd * (math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * math.erfc(z / math.sqrt(2)) / 2) / mean
    assert small == pytest.approx(expected, rel=0.1)
    assert small > 0.003 and large < 1e-6


def test_ragged_chunks_and_cells_by_hand():
    """Fails when a chunk's buffer is not shared by its experts, or a cell's room is lent to another."""
    x = np.array([[[2.0, 0.0, 1.5, 0.5], [1.0, 1.0, 1.0, 1.0]]])  # one exchange, two senders, four experts: two per rank
    shape = Shape(2, 4, 2, 10_000, 1)
    ragged = drops.dropped(x, shape, "ragged", Capacity(1.0, 1.0, 1))
    assert [float(side[0]) for side in ragged] == [0.0, 0.0]  # both receivers get 1.0 in all
    split = drops.dropped(x, shape, "ragged", Capacity(1.0, 1.0, 2))
    assert split[1][0] == pytest.approx((0.5 + 0.25) / 4)  # chunks of one expert get 1.5, 0.5, 1.25, 0.75
    cell = drops.dropped(x, shape, "cell", Capacity(1.25, 9.0, 1))
    assert cell[0][0] == pytest.approx((0.75 + 0.25) / 8) and cell[1][0] == 0


@given(documents=st.floats(1, 60))
def test_lengths_count_as_the_documents_asked(documents):
    """Fails when a number of documents between two whole ones gives another variance than asked."""
    w = drops.weights(documents)
    assert w.sum() == pytest.approx(1) and (w >= 0).all()
    assert 1 / (w**2).sum() == pytest.approx(documents)


def test_very_many_documents_are_as_if_each_were_drawn():
    """Fails when the short cut beyond 64 documents changes what is expected."""
    shape = Shape(1, 16, 2, 10**7, 144)
    rng = np.random.default_rng(3)
    p = np.minimum(rng.dirichlet(np.full(16, 0.05), (400, 144)), 0.5)
    for _ in range(20):
        p = np.minimum(p / p.sum(-1, keepdims=True), 0.5)
    plain = np.maximum(0, 16 * p.mean(1) - 1.15).mean()
    assert drops.expected(shape, "local", Capacity(1.15, 1.15, 1), 0.05).receiver == pytest.approx(plain, rel=0.05)


def test_the_same_figures_at_every_call_and_an_honest_error(monkeypatch):
    """Fails when a plan changes from call to call, or the stated error is not the spread over other seeds."""
    shape, capacity = Shape(8, 64, 4, 4096, 4), Capacity(1.15, 1.15, 1)
    first = drops.expected(shape, "pooled_wave", capacity)
    drops._simulated.cache_clear()
    assert drops.expected(shape, "pooled_wave", capacity) == first
    found = []
    for seed in range(10):
        monkeypatch.setattr(drops, "_SEED", seed)
        drops._simulated.cache_clear()
        found.append(drops.expected(shape, "pooled_wave", capacity))
    drops._simulated.cache_clear()
    spread, stated = np.std([d.sender for d in found], ddof=1), math.sqrt(np.mean([d.sender_error**2 for d in found]))
    assert 0.4 < spread / stated < 2.5


def test_alpha_for_other_numbers_of_experts():
    """Fails when the published shape loses its number, or a document's loads vary otherwise than in proportion to E / K."""
    assert drops.assumed(384, 8) == 0.31
    for experts, chosen in ((192, 4), (32, 4), (128, 4), (16, 2)):
        alpha = drops.assumed(experts, chosen)
        loads = experts * np.random.default_rng(0).dirichlet(np.full(experts, alpha), 20_000)
        assert loads.var() / (experts / chosen) == pytest.approx(383 / (0.31 * 384 + 1) / 48, rel=0.03)
    assert drops.assumed(1, 1) > 0 and drops.assumed(8, 8) > 0


# ---- in a plan ------------------------------------------------------------------------------------


def test_the_plan_of_the_reference_run():
    """Fails when the table of documents, the lengths, the flags or the published figures are missing from the plan."""
    found = plan(marin_535b.run())["drops"]
    rows = {row["seq_len"]: row for row in found["by_seq_len"]}
    assert {n: row["documents_per_shard"] for n, row in rows.items()} == {
        4096: 16, 8192: 8, 16_384: 4, 32_768: 2, 65_536: 1, 131_072: 1, 262_144: 1,
    }  # fmt: skip
    assert list(rows[4096]["transports"]) == ["pooled_wave", "ragged", "cell at 1.15", "cell at 1.33"]
    assert rows[4096]["transports"]["cell at 1.33"]["sender"] == pytest.approx(0.071, abs=0.005)
    assert rows[65_536]["transports"]["pooled_wave"]["sender"] == pytest.approx(0.222, abs=0.005)
    flagged = {tuple(one) for one in found["flagged"]}
    assert {("cell at 1.33", 4096), ("pooled_wave", 16_384), ("pooled_wave", 262_144)} <= flagged
    assert not flagged & {("pooled_wave", 4096), ("pooled_wave", 8192), ("ragged", 262_144)}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    later = plan(marin_535b.ragged())["drops"]
    assert later["own"] == next(iter(later["by_seq_len"][0]["transports"])) == "ragged"


@pytest.mark.parametrize("settings", [["routing.capacity=dropless"], ["routing.exchange=dense"]])
def test_nothing_is_said_of_drops_where_nothing_drops(settings):
    """Fails when a dropless run is given a table of drops."""
    assert plan(spec.override(pocket.run(), settings))["drops"] is None


def test_a_run_past_five_percent_is_warned_of():
    """Fails when the run's own transport at its own length passes 5% without a word, or a mild one is warned of."""
    long = ["data.seq_len=65536", "data.batch_seqs=704"]
    said = [w["text"] for w in plan(spec.override(marin_535b.run(), long))["warnings"] if w["about"] == "drops"]
    assert len(said) == 1 and "22." in said[0] and "at the sender" in said[0]
    assert not [w for w in plan(marin_535b.run())["warnings"] if w["about"] == "drops"]


def test_accumulated_parts_hold_fewer_documents():
    """Fails when a part of an accumulated step is taken for the whole of a device's tokens."""
    run = spec.override(pocket.run(), ["compute.accumulate=4"])
    assert drops.shape(run) == Shape(1, 32, 4, 512, 2.0)


# ---- alpha, found again ---------------------------------------------------------------------------


def synthesised(rng, shape, alpha, updates, cells=4):
    """Histograms of updates: each of `cells` independent shards with rows drawn one expert at a time."""
    rows = []
    for _ in range(updates):
        x = []
        for _ in range(cells):
            load = np.zeros(shape.experts)
            for _ in range(shape.documents):
                p = plain_shares(rng, shape.experts, shape.chosen, alpha)
                load += rng.binomial(shape.tokens // shape.documents, np.minimum(1, shape.chosen * p))
            x.append(load / load.mean())
        rows.append(np.histogram(x, (0, *drops.EDGES, np.inf))[0] / np.size(x))
    none, held = np.zeros(updates), np.full(updates, float(shape.documents))
    return drops.Logged(np.array(rows), held, none, none)


@pytest.mark.parametrize(("alpha", "documents"), [(0.1, 4), (0.31, 4), (1.0, 2)])
def test_alpha_is_found_again(alpha, documents):
    """Fails when loads of a known alpha are fitted by another, or the interval misses it more often than it says."""
    shape, inside = Shape(1, 48, 4, 2048, documents), 0
    for seed in range(8):
        found = drops.fit(synthesised(np.random.default_rng(seed), shape, alpha, 48), shape)
        inside += found.low <= alpha <= found.high
        assert found.alpha == pytest.approx(alpha, rel=0.15) and found.edge == "" and found.documents == documents
        assert found.high / found.low < 1.4
    assert inside >= 6


def test_loads_that_bound_alpha_only():
    """Fails when loads as even as their rows' noise are given an alpha as if it were known."""
    shape = Shape(1, 48, 4, 2048, 4)
    assert drops.fit(synthesised(np.random.default_rng(0), shape, 1e4, 16), shape).edge == "most"


def test_what_cannot_be_fitted_is_refused():
    """Fails when too few updates, or histograms of another version, give a number."""
    shape, none = Shape(1, 48, 4, 2048, 4), np.zeros(15)
    with pytest.raises(ValueError, match=r"15 updates.*nearest legal 16"):
        drops.fit(drops.Logged(np.ones((15, drops.BINS)), none, none, none), shape)
    with pytest.raises(ValueError, match="12 bins"):
        drops.fit(drops.Logged(np.ones((20, 12)), none, none, none), shape)
