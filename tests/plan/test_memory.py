"""Memory by hand for single kinds, and beside what was published of the reference run."""

import pytest

from argosy import spec
from argosy.plan import memory, work
from argosy.runs import marin_535b, pocket

GIB = 2**30


def test_routed_experts_by_hand():
    """Fails when a routed weight is not 2 bytes on the device and 4 + 4 on the host, over 64 ranks, or a gain is rounded."""
    run = marin_535b.run()
    mine = 48 * 6 * 3 * 3072 * 3072  # layers, local experts, gate up down
    assert work.held(run)["routed"] == mine
    others = sum(n for part, n in work.held(run).items() if part != "routed")
    plain = 128_256 * 6144 + 98 * 6144 + 48 * 3072 + 48 * 4 * (12 * 128 + 2 * 6144)  # embedding, gains, convolutions
    stay = memory.steady(run)
    assert stay["device"]["params"] == 2 * (mine + others) + 2 * plain
    assert stay["host"]["masters"] == 4 * (mine + others - plain)
    adam = sum(work.held(run)[part] for part in ("embed", "readout", "router", "head_gate", "norm", "conv"))
    assert stay["host"]["optimizer_state"] == pytest.approx(4 * (mine + others) + 4 * adam)


@pytest.mark.parametrize(
    ("run", "sender", "receiver"),
    [(marin_535b.run(), 64, 384), (marin_535b.ragged(), 64, 64 * marin_535b.ragged().routing.waves), (pocket.run(), 1, 32)],
)
def test_capacity_ends_where_nothing_more_can_come(run, sender, receiver):
    """All of a device's rows to one rank, all of all ranks' to one expert or chunk: larger factors are no larger buffers."""
    ends = spec.override(run, [f"routing.sender_capacity={sender}", f"routing.receiver_capacity={receiver}"])
    beyond = spec.override(run, ["routing.sender_capacity=1e9", "routing.receiver_capacity=1e9"])
    assert work.rows(beyond) == work.rows(ends)
    assert memory.block(beyond) == memory.block(ends)
    less = spec.override(ends, [f"routing.sender_capacity={sender - 0.5}", f"routing.receiver_capacity={receiver - 0.5}"])
    assert memory.block(less)["dispatched"] < memory.block(ends)["dispatched"]


@pytest.mark.parametrize("exchange", ["pooled_wave", "ragged"])
def test_dropless_over_ranks_holds_and_moves_every_ranks_tokens(exchange):
    """Fails when a dropless run over 64 ranks is planned as if K rows of a token travelled, or none beyond its own were held."""
    run = spec.override(marin_535b.run(), [f"routing.exchange={exchange}", "routing.capacity=dropless"])
    assert work.parts(run) == 65_536 * 8 * 64 // 2**18
    held = memory.block(run)
    assert held["dispatched"] == 64 * 3072
    assert held["returned"] * 65_536 == 2**18 * 3072  # one part's room
    assert held["hidden"] == pytest.approx(3 * 3072 * 8 * run.routing.receiver_capacity)
    out, back, shares = 3072 * 2, 3072 * 4, 8 * 4  # bytes of a token, its float32 sum, its combine weights
    forward, backward = out + back + 2 * shares + 1, out + back + shares  # beside them the experts' numbers, and `valid`
    again = {"none": 0, "block": forward, "block_keep_dispatch": back + 2 * shares + 1}[run.compute.remat]
    assert work.step(run).expert == pytest.approx(48 * 65_536 * 63 * (forward + again + backward))


def test_published_buffers_of_the_reference_run():
    """Fails when the plan loses a buffer that the published assignment names (marin#8508)."""
    moments = memory.moments(marin_535b.run())
    assert moments["backward"]["saved"] == 36.0 * GIB  # bf16[48,16,4096,6144]
    assert moments["backward"]["prefetched"] == pytest.approx(40.5 * GIB, rel=0.02)  # 4 x f32[48,6,3072,3072]


def test_published_peaks_of_the_reference_run():
    """Fails when a predicted peak leaves 10% of a published one: 149.9 and 137.9 GiB; 35.09 GiB steady."""
    pooled, ragged = memory.plan(marin_535b.run()), memory.plan(marin_535b.ragged())
    assert pooled["per_device_bytes"]["device"]["total"] == pytest.approx(149.9 * GIB, rel=0.10)
    assert ragged["per_device_bytes"]["device"]["total"] == pytest.approx(137.9 * GIB, rel=0.10)
    assert ragged["steady_device_bytes"] == pytest.approx(35.09 * GIB, rel=0.02)
    assert pooled["fits"] and ragged["fits"]


def test_kinds_add_up_and_name_their_place():
    """Fails when a kind is missing from its total, or sits on the wrong side of the host link."""
    for run in (marin_535b.run(), marin_535b.ragged(), pocket.run()):
        found = memory.plan(run)
        for kinds in found["per_device_bytes"].values():
            assert kinds["total"] == pytest.approx(sum(n for kind, n in kinds.items() if kind != "total"))
        assert found["per_device_bytes"]["device"]["total"] == max(found["moments_bytes"].values())
    assert set(memory.steady(marin_535b.run())["host"]) == {"masters", "optimizer_state"}
    assert set(memory.steady(marin_535b.ragged())["host"]) == {"optimizer_state"}
    assert memory.steady(pocket.run())["host"] == {}


def test_float32_weights_are_their_own_masters():
    """Fails when float32 weights are held twice."""
    assert "masters" not in memory.steady(pocket.run())["device"]
    assert "masters" in memory.steady(spec.override(pocket.run(), ["compute.precision=bf16", "compute.params=bf16"]))["device"]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ("compute.remat=block", "compute.remat=none"),
        ("compute.remat=block", "compute.remat=block_keep_dispatch"),
        ("compute.accumulate=2", "compute.accumulate=1"),
        ("data.batch_seqs=5632", "data.batch_seqs=11264"),
    ],
)
def test_what_must_save_activations_does(less, more):
    """Fails when recomputing, accumulating or halving the batch keeps more values for the backward pass."""
    run = marin_535b.run()
    saved = [memory.moments(spec.override(run, [choice]))["backward"]["saved"] for choice in (less, more)]
    assert saved[0] < saved[1]


def test_adamw_holds_two_moments_of_everything():
    """Fails when AdamW's state is planned like MuonH's."""
    run = spec.override(pocket.run(), ["optim.rule=adamw"])
    assert work.state_words(run) == 2 * sum(work.held(run).values())
    assert work.state_words(pocket.run()) < work.state_words(run)
