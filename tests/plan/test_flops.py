"""Parameters and FLOPs in closed form against the published figures and the counted leaves."""

import json
from collections import Counter

import pytest

from argosy import leaf, spec
from argosy.model import transformer
from argosy.plan import flops, work
from argosy.runs import RECIPES, marin_535b, pocket

# reference_run 1.3
HERO_PARTS = {
    "routed": 521_838_526_464,
    "attention": 4_529_848_320,
    "latent": 1_811_939_328,
    "shared": 5_435_817_984,
    "router": 113_246_208,
    "embed": 788_004_864,
    "readout": 788_004_864,
    "gated_norm": 150_994_944 + 2 * 2 * 6144 * 128,  # in the blocks, and two at the top
    "head_gate": 48 * 6144 * 48,
    "norm": 48 * (2 * 6144 + 3072) + 2 * 6144,
    "conv": 48 * 4 * (1536 + 2 * 6144),
    "router_bias": 48 * 384,
}
# width: total, active, no-head FLOPs of a step (reference_run 5.1; marin_ladder/ladder_meta.csv)
RUNGS = {
    768: (1_591_848_448, 60_555_264, 2_320_210_052_775_936),
    1024: (3_980_116_480, 162_004_992, 11_299_543_559_700_480),
    1536: (11_534_398_464, 481_296_384, 91_309_218_006_564_864),
    2048: (27_742_902_528, 1_170_735_104, None),
}
CHOICES = (
    "moe.latent=none",
    "model.head_gate=none",
    "model.convolution=none",
    "moe.shared_experts=0",
    "routing.balance=aux_loss",
    "model.gate_rank=8",
)


def test_hero_parameters_are_the_published_ones():
    """Fails when any part of the reference run's 535,477,106,688 parameters is miscounted."""
    run = marin_535b.run()
    assert flops.params(run) == HERO_PARTS
    assert sum(flops.params(run).values()) == 535_477_106_688
    assert flops.active(run) == 22_762_487_808


def test_hero_flops_are_the_published_ones():
    """Fails when a term of the reference's FLOP formula is missing or doubled."""
    run = marin_535b.run()
    assert f"{flops.train_step(run, readout=True):.12e}" == "6.908433317700e+18"
    assert f"{flops.train_step(run, readout=False):.12e}" == "6.690294608796e+18"
    assert round(flops.forward_per_token(run, readout=False) / 1e9, 3) == 48.336


def test_active_variants_are_the_published_ones():
    """Fails when a wider convention of active parameters leaves something out: 23.55B, 23.72B, 24.51B."""
    found = [round(n / 1e9, 2) for n in flops.active_variants(marin_535b.run()).values()]
    assert found == [22.76, 23.55, 23.72, 24.51]


@pytest.mark.parametrize("width", RUNGS)
def test_rungs_are_the_published_ones(width):
    """Fails when a rung's size or step differs from the ladder's table."""
    run, (total, active, step) = marin_535b.rung(width), RUNGS[width]
    assert sum(flops.params(run).values()) == total
    assert flops.active(run) == active
    if step is not None:
        assert flops.train_step(run, readout=False) == step


def test_the_official_constant_of_width_2048_takes_one_global_layer_for_local():
    """Fails when the known difference to the published 7.7418e21 is not exactly its last layer."""
    run = marin_535b.rung(2048)
    m = run.model
    wide = 2 * m.width * 2 * m.kv_heads_global * 128 + m.heads * 4096 * 515
    local = 2 * m.width * 2 * m.kv_heads_local * 128 + m.heads * 2048 * 515
    official = flops.forward_per_token(run, readout=False) - wide + local
    assert float(3 * official * spec.tokens_per_step(run)) == 3.857022193930076e17  # marin_ladder/ladder_meta.csv


@pytest.mark.parametrize("name", RECIPES)
def test_parts_equal_the_counted_leaves(name):
    """Fails when the closed forms and the declared parameters of any recipe differ by one."""
    _compare(RECIPES[name]())


@pytest.mark.parametrize("choice", CHOICES)
def test_parts_equal_the_counted_leaves_under_named_choices(choice):
    """Fails when a named choice changes the model and not the count, or the other way round."""
    run = spec.override(pocket.run(), [choice])
    _compare(run)
    if choice != "model.gate_rank=8":
        assert flops.params(run) != flops.params(pocket.run())


def _compare(run: spec.Run) -> None:
    counted: Counter[str] = Counter()
    for one in leaf.flatten(transformer.leaves(run)).values():
        counted[one.part] += one.size
    expected = {part: n for part, n in flops.params(run).items() if n and part != "router_bias"}
    assert dict(counted) == expected


def test_parts_are_divided_as_the_leaves_are():
    """Fails when the memory plan divides a part over other axes than its leaves do."""
    run = spec.override(marin_535b.run(), ["mesh.data=2", "mesh.expert=32"])
    sizes = {"expert": 32, "data": 2}
    for name, one in leaf.flatten(transformer.leaves(run)).items():
        ways = 1
        for axes in one.spec:
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                ways *= sizes[axis]
        assert ways == work.divisor(run, one.part), name


@pytest.mark.parametrize("choice", ["moe.latent=none", "data.seq_len=64", "moe.experts_per_token=8", "model.global_every=2"])
def test_flops_by_hand_under_named_choices(choice):
    """Fails when forward FLOPs do not follow the formula of reference_run 1.4 under a choice."""
    run = spec.override(pocket.run(), [choice])
    m, moe, seq = run.model, run.moe, run.data.seq_len
    z = m.width if moe.latent == "none" else moe.latent_width
    total = 0
    for layer in range(m.layers):
        wide = (layer + 1) % m.global_every == 0 or layer == m.layers - 1
        kv = m.kv_heads_global if wide else m.kv_heads_local
        seen = seq if wide else min(seq, m.window)
        total += 2 * m.width * (m.heads + 2 * kv) * m.head_width + 2 * m.heads * m.head_width * m.width
        total += m.heads * seen * (4 * m.head_width + 3) + 2 * m.width * moe.experts
        total += moe.experts_per_token * 3 * 2 * z * moe.hidden + moe.shared_experts * 3 * 2 * m.width * moe.shared_hidden
        total += 0 if moe.latent == "none" else 2 * 2 * m.width * z
    assert flops.forward_per_token(run, readout=False) == total
    assert flops.forward_per_token(run, readout=True) == total + 2 * m.width * m.vocab


def test_counts_are_whole_numbers():
    """Fails when a float sneaks into a count: JSON would print 5e11."""
    assert all(isinstance(n, int) for n in flops.params(marin_535b.run()).values())
    assert "." not in json.dumps(flops.params(marin_535b.run()))
