"""A real run's logged loads: the drop model fitted to them, beside the drops that the run counted."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from argosy import runs, spec
from argosy.data import prepare, tokens
from argosy.plan import drops
from argosy.train import loop

SMALL = [
    "model.vocab=512", "model.width=32", "model.layers=2", "model.head_width=8", "model.window=64", "model.gate_rank=4",
    "data.seq_len=128", "data.batch_seqs=4", "data.corpus=code", "data.max_epochs=1000", "moe.experts=16", "moe.experts_per_token=2",
    "moe.hidden=16", "moe.latent_width=16", "moe.shared_hidden=16", "optim.horizon_tokens=153600",
    "evals.tokens_per_set=256", "evals.batch_seqs=4", "evals.every_frac=1", "compute.readout_block_tokens=128",
    'data.phases=[{"name":"main","until_frac":1.0,"weights":[["*",1]]}]',
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a corpus of real text: modules of this Python's library."""
    home = tmp_path_factory.mktemp("home")
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    prepare.build("code", [str(path) for path in texts], home, vocab=512)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.15, 1.5])
def test_the_fitted_model_meets_the_counted_drops(home, factor):
    """Fails when loads, documents or drops of a real run are logged otherwise than the model understands them."""
    run = spec.override(runs.find("pocket"), [*SMALL, f"routing.receiver_capacity={factor}"])
    rows = {}
    loop.train(
        run,
        spec.Host(home=home, name=f"small-{factor}", checkpoint_every_s=1e9),
        tokens.open_store(home / "corpora" / "code"),
        record=lambda step, row: rows.setdefault(step, row),
        event=lambda *_, **__: None,
        evaluate=lambda _: {},
        progress=lambda *_: None,
    )
    last = [rows[step] for step in sorted(rows) if step > 0.75 * spec.steps(run)]
    column = lambda name: np.array([row[name] for row in last])  # noqa: E731
    counts = np.stack([column(f"moe/cell_load_histogram/bin_{i:02d}") for i in range(drops.BINS)], 1)
    np.testing.assert_allclose(counts.sum(1), 1, rtol=1e-6)
    held = column("data/equal_documents_per_shard")
    logged = drops.Logged(counts, held, column("moe/sender_drop_fraction"), column("moe/receiver_drop_fraction"))
    assert (held >= 1).all() and (held <= column("data/documents_per_shard") + 1e-4).all()
    np.testing.assert_allclose(
        column("throughput/accepted_mfu") / column("throughput/mfu"),
        1 - column("moe/drop_fraction") * 2 * 6 * 16 * 16 * 2 / forward(run),
        rtol=1e-6,
    )
    found = drops.refit("small", run, logged)
    predicted, counted = found["predicted"]["receiver"], found["logged"]["receiver"]
    print(f"capacity {factor}: alpha {found['alpha']:.3g} ({found['low']:.3g} to {found['high']:.3g}),", end=" ")
    print(f"{found['documents']:.1f} documents; {predicted:.2%} by the model, {counted:.2%} counted")
    assert found["edge"] == ""
    assert predicted == pytest.approx(counted, rel=0.35, abs=0.005)


def forward(run):
    """FLOPs of one token's forward pass with readout, written out for these sizes (reference_run 1.4)."""
    d, heads, head, seq = 32, 4, 8, 128
    block = 6 * 16 * 16 * 2 + 6 * d * 16 * 2 + 2 * d * 16 + 2 * heads * head * d + 4 * d * 16
    seen = {False: min(64, seq), True: seq}
    attention = 0
    for layer in range(2):
        wide = layer == 1  # the last layer is global
        attention += 2 * d * (heads * head + 2 * (1 if wide else 2) * head) + heads * seen[wide] * (4 * head + 3)
    return 2 * block + attention + 2 * d * 512
