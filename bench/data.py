"""How fast the corpus is built and batches are read, beside the rate at which the pocket run trains.

    python bench/data.py [--home voyages]

Building: text in over wall time, on all cores. Reading: whole batches of the pocket run on the host, one thread,
median and range over stretches of the run. The training rate is the median of a run under `--home`, if there is one.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from argosy import runs, spec
from argosy.data import loader, prepare, tokens
from argosy.track import log

STRETCHES, STEPS = 9, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path("voyages"))
    parser.add_argument("--run", default="pocket")
    given = parser.parse_args()
    run = runs.find("pocket")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        ledger = prepare.build(prepare.STDLIB, (), Path(folder))
        build_s = time.perf_counter() - start
        corpus = tokens.open_store(Path(folder) / "corpora" / prepare.STDLIB)
        text_mb = (
            sum(s[split]["bytes"] for s in ledger["sources"].values() for split in ("train", "held_out") if split in s) / 1e6
        )
        rates = []
        for stretch in range(STRETCHES):
            start = time.perf_counter()
            for step in range(stretch * STEPS, (stretch + 1) * STEPS):
                loader.batch_numpy(run, corpus, step)
            rates.append(STEPS * spec.tokens_per_step(run) / (time.perf_counter() - start))
    try:
        trained = statistics.median(log.read(given.run, given.home).series("throughput/tokens_per_second")[1].tolist())
    except ValueError:
        trained = None
    table = Table(title="data", title_justify="left", box=None, pad_edge=False)
    for column in ("what", "median", "range", "note"):
        table.add_column(column)
    table.add_row("build", f"{text_mb / build_s:.1f} MB/s", "", f"{text_mb:.1f} MB in {build_s:.1f} s; floor 3 MB/s")
    loaded = statistics.median(rates)
    times = (
        f"{loaded / trained:,.0f} times the training rate of {trained:,.0f}; floor 20"
        if trained
        else f"no run {given.run!r} in {given.home}"
    )
    table.add_row("read", f"{loaded / 1e6:.2f}M tokens/s", f"{min(rates) / 1e6:.2f}-{max(rates) / 1e6:.2f}M", times)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
