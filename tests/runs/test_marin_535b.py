"""The reference run's recipes against the published table."""

import pytest

from argosy import runs, spec
from argosy.plan import flops, scaling
from argosy.runs import marin_535b

# reference_run 5.1: layers, heads, kv local, kv global, racks, batch, steps, billions of tokens, adam_lr, muonh_lr, eps, beta2
TABLE = {
    768: (8, 6, 1, 1, 1, 1024, 11_420, 47.90, 3.6505e-3, 0.015819, 1.034e-15, 0.96849),
    1024: (12, 8, 2, 1, 2, 2048, 15_276, 128.14, 3.3257e-3, 0.014411, 1.196e-15, 0.95),
    1536: (16, 12, 3, 1, 6, 6144, 15_128, 380.71, 3.4360e-3, 0.014889, 1.190e-15, 0.95),
    2048: (22, 16, 4, 2, 11, 11_264, 20_072, 926.07, 3.0973e-3, 0.013422, 1.371e-15, 0.95),
    6144: (48, 48, 12, 6, 11, 11_264, 390_251, 18_005.14, 7.5934e-4, 0.0032905, 6.045e-15, 0.95),
}


@pytest.mark.parametrize("width", TABLE)
def test_the_ladders_table(width):
    """Fails when a rung's shape, batch, steps or rates differ from the published table."""
    run = marin_535b.run() if width == 6144 else marin_535b.rung(width)
    layers, heads, local, wide, racks, batch, steps, billions, adam, muonh, eps, beta2 = TABLE[width]
    m, moe = run.model, run.moe
    assert (m.width, m.layers, m.heads, m.kv_heads_local, m.kv_heads_global) == (width, layers, heads, local, wide)
    assert (run.mesh.replica, spec.devices(run), run.data.batch_seqs, spec.steps(run)) == (racks, 64 * racks, batch, steps)
    assert {moe.hidden, moe.latent_width, moe.shared_hidden} == {width // 2}
    assert round(steps * spec.tokens_per_step(run) / 1e9, 2) == billions
    rates = scaling.rates(run)
    assert rates.adam_lr == pytest.approx(adam, rel=2e-5)
    assert rates.muonh_lr == pytest.approx(muonh, rel=4e-5)
    assert rates.eps == pytest.approx(eps, rel=4e-4)
    assert rates.beta2 == pytest.approx(beta2, rel=1e-5)


def test_launch_form_and_later_form_differ_in_placement_and_transport_alone():
    """Fails when the two forms of the run drift apart in anything that they should share."""
    changed = spec.difference(marin_535b.run(), marin_535b.ragged())
    assert changed == {
        "routing.exchange": ("pooled_wave", "ragged"),
        "routing.waves": (3, 2),
        "compute.params": ("bf16", "fp32"),
        "compute.masters": ("pinned_host", "device"),
    }


def test_pooled_buffers_are_the_published_ones():
    """Fails when waves or capacities change: 3,141 rows per destination and wave, 33,497 per expert and wave."""
    run = marin_535b.run()
    assignments = 65_536 * 8
    assert -(-115 * assignments // (100 * 64 * run.routing.waves)) == 3_141
    assert -(-115 * assignments // (100 * 6 * run.routing.waves)) == 33_497
    assert (run.routing.sender_capacity, run.routing.receiver_capacity) == (1.15, 1.15)


def test_phases_switch_where_the_reference_did():
    """Fails when the cooldown does not start at 312,192 in the reference's blocks, or shares are no mixture."""
    run = marin_535b.run()
    assert spec.phase_stops(run) == [312_192, 390_251]
    for phase in run.data.phases:
        assert sum(w for _, w in phase.weights) == pytest.approx(1.0)


def test_epoching_is_simulated_below_1e23_flops():
    """Fails when the hero's sources are cut, or a rung's are not."""
    assert marin_535b.run().data.epoching == "plain"
    assert {marin_535b.rung(w).data.epoching for w in marin_535b.RUNGS} == {"simulated"}


@pytest.mark.parametrize(("width", "nearest"), [(800, 768), (6144, 2048), (0, 768)])
def test_a_width_that_is_no_rung_names_the_nearest(width, nearest):
    """Fails when an unknown rung is built, or refused without help."""
    with pytest.raises(ValueError, match=f"rungs: 768, 1024, 1536, 2048; nearest {nearest}"):
        marin_535b.rung(width)


@pytest.mark.parametrize("name", [n for n in runs.RECIPES if n.startswith("marin")])
def test_recipes_are_found_and_survive_json(name):
    """Fails when a recipe's name, its registration and its JSON disagree."""
    run = runs.find(name)
    assert run.recipe == name
    assert spec.from_json(spec.to_json(run)) == run


# total and active parameters, steps, and both peak rates to four digits: reference_run 5.1
RUNGS = {
    "d768": (8, 1_591_848_448, 60_555_264, 11_420, "0.01582", "0.003651"),
    "d1024": (12, 3_980_116_480, 162_004_992, 15_276, "0.01441", "0.003326"),
    "d1536": (16, 11_534_398_464, 481_296_384, 15_128, "0.01489", "0.003436"),
    "d2048": (22, 27_742_902_528, 1_170_735_104, 20_072, "0.01342", "0.003097"),
}


def test_the_rungs_to_the_last_parameter_and_their_share_of_the_hero():
    """Published: 0.36% of the hero's FLOPs without the readout, 0.42% with it (reference_run 5.1)."""
    rungs, hero = marin_535b.rungs(), marin_535b.run()
    assert {r.name for r in rungs} == set(RUNGS)
    assert {r.purpose for r in rungs} == {"size"}
    for r in rungs:
        rates = scaling.rates(r.run)
        found = (r.run.model.layers, sum(flops.params(r.run).values()), flops.active(r.run), spec.steps(r.run))
        assert (*found, f"{rates.muonh_lr:.4g}", f"{rates.adam_lr:.4g}") == RUNGS[r.name]
        assert r.run == runs.find(f"marin-535b/{r.name}")
    for readout, published in ((False, "0.36%"), (True, "0.42%")):
        own = sum(spec.steps(r.run) * flops.train_step(r.run, readout=readout) for r in rungs)
        assert f"{own / (spec.steps(hero) * flops.train_step(hero, readout=readout)):.2%}" == published


def test_the_rungs_of_the_later_form_are_in_the_later_form():
    """Fails when a hero's transport or precision does not reach its rungs."""
    for early, late in zip(marin_535b.rungs(), marin_535b.rungs(marin_535b.ragged()), strict=True):
        assert spec.difference(early.run, late.run) == spec.difference(marin_535b.run(), marin_535b.ragged())
