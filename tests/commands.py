"""Commands as a user types them, here or in a process of their own, and a home in which they train for real within seconds."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from argosy import cli

RECIPE = """
from argosy import runs, spec


def run():
    return spec.override(runs.find("pocket"), [
        "model.vocab=320", "model.width=32", "model.layers=2", "model.head_width=8", "model.window=8", "model.gate_rank=4",
        "moe.experts=8", "moe.experts_per_token=2", "moe.hidden=16", "moe.latent_width=16", "moe.shared_hidden=16",
        "data.corpus=words", "data.seq_len=32", "data.batch_seqs=4", "data.max_epochs=100", "optim.horizon_tokens={tokens}",
        "evals.tokens_per_set=256", "evals.batch_seqs=4", "evals.every_frac=0.5", "compute.readout_block_tokens=64",
        'data.phases=[{{"name": "main", "until_frac": 1.0, "weights": {{"words": 1}}}}]',
    ])
"""
TOKENS_PER_STEP = 128


def make(home: Path, updates: int) -> Path:
    """A home with a recipe of so many updates, `tiny.py:run`, and its corpus `words`."""
    (home / "tiny.py").write_text(RECIPE.format(tokens=updates * TOKENS_PER_STEP))
    draw = random.Random(0)
    words = ["sail", "wind", "rope", "deck", "mast", "keel", "tide", "star", "port", "crew"]
    texts = [" ".join(draw.choices(words, k=60)) + f" {i}." for i in range(80)]
    (home / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = finished(home, "data", "build", str(home / "words.jsonl"), "--name", "words", "--vocab", "320")
    assert done.returncode == 0, done.stderr
    return home


def call(capsys: Any, *argv: object) -> tuple[Any, str, str]:
    """Exit status, standard output, standard error of a command in this process."""
    try:
        cli.main(list(map(str, argv)))
        status: Any = 0
    except SystemExit as stop:
        status = stop.code
    out = capsys.readouterr()
    return status, out.out, out.err


def command(home: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "argosy.cli", *words, "--home", str(home)]


def spawn(home: Path, *words: str) -> subprocess.Popen:
    """A command under way, its outputs as pipes."""
    return subprocess.Popen(command(home, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(home: Path, *words: str) -> subprocess.CompletedProcess:
    """A command at its end."""
    return subprocess.run(command(home, *words), capture_output=True, text=True, check=False, timeout=600)


def files(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Bytes and times of everything below a folder."""
    return {p.relative_to(folder): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
