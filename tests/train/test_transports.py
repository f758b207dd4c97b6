"""Transports over eight devices beside the oracle, on real text: what drops cost the loss."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from argosy import runs, spec
from argosy.data import prepare, tokens
from argosy.train import loop

UPDATES = 500
SMALL = [
    "model.vocab=512", "model.width=32", "model.layers=2", "model.head_width=8", "model.window=32", "model.gate_rank=4",
    "data.seq_len=64", "data.batch_seqs=64", "data.corpus=code", "data.max_epochs=1000",
    "moe.experts=16", "moe.experts_per_token=2", "moe.hidden=16", "moe.latent_width=16", "moe.shared_hidden=16",
    f"optim.horizon_tokens={UPDATES * 64 * 64}", "evals.tokens_per_set=256", "evals.batch_seqs=8", "evals.every_frac=1",
    "compute.readout_block_tokens=512", "mesh.data=2", "mesh.expert=4",
    'data.phases=[{"name":"main","until_frac":1.0,"weights":[["*",1]]}]',
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a corpus of real text: modules of this Python's library."""
    home = tmp_path_factory.mktemp("home")
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    prepare.build("code", [str(path) for path in texts], home, vocab=512)
    return home


def curve(home, exchange):
    """Cross-entropy and drop fraction of every update."""
    run = spec.override(runs.find("pocket"), [*SMALL, f"routing.exchange={exchange}"])
    rows = {}
    loop.train(
        run,
        spec.Host(home=home, name=exchange, checkpoint_every_s=1e9),
        tokens.open_store(home / "corpora" / "code"),
        record=lambda step, row: rows.setdefault(step, row),
        event=lambda *_, **__: None,
        evaluate=lambda _: {},
        progress=lambda *_: None,
    )
    return [
        np.array([rows[step][name] for step in range(1, UPDATES + 1)])
        for name in ("train/cross_entropy_loss", "moe/drop_fraction")
    ]


@pytest.mark.slow
def test_transports_follow_the_dense_loss(home):
    """Fails when what a transport drops at 1.15, or how it carries the rest, costs more than 1% of the loss."""
    dense, nothing = curve(home, "dense")
    assert not nothing.any()
    for exchange in ("pooled_wave", "ragged"):
        loss, drops = curve(home, exchange)
        apart = np.abs(np.convolve(loss / dense - 1, np.ones(20) / 20, "valid"))[80:]
        print(
            f"{exchange}: loss {loss[-20:].mean():.4f}, dense {dense[-20:].mean():.4f}; from update 100 on at most"
            f" {apart.max():.2%} apart (mean {apart.mean():.2%}); drops {drops[:100].mean():.2%} before update 100,"
            f" {drops[100:].mean():.2%} after"
        )
        assert drops[100:].max() > 0
        assert apart.max() < 0.01
