"""From files to a corpus: read, deduplicate, hold out, tokenize, store, with a ledger of all of it.

The text is held in memory while a corpus is built. A corpus appears whole or not at all: it is made in a folder
beside its place and renamed.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import rich.box
import rich.console
import rich.progress
import rich.table
from numpy import ndarray

from argosy import __version__
from argosy.data import dedup, documents, tokens
from argosy.data import tokenizer as tokenizers
from argosy.data.documents import STDLIB, Document, File, Skipped

HELD_OUT_FRAC = 0.025
HELD_OUT_BYTES = 100_000  # at least, so that gzip and bits per byte mean something ...
HELD_OUT_MOST_FRAC = 0.15  # ... but never more than this share of a small source
SAMPLE_BYTES_PER_TOKEN = 4096  # the tokenizer is trained on this much text per entry of its vocabulary
BATCH_BYTES = 4 << 20
ORPHAN = "prose of a file that is left out"
Splits = dict[str, dict[str, list[Document]]]  # source -> split -> documents in rank order
LeftOut = dict[str, dict[str, list[int]]]  # source -> reason -> [documents, bytes]


def build(
    name: str,
    inputs: Sequence[str],
    home: Path,
    *,
    force: bool = False,
    tokenizer: Path | None = None,
    vocab: int = tokenizers.VOCAB,
    text_key: str = "text",
) -> dict[str, Any]:
    """The ledger of the corpus `<home>/corpora/<name>`, built from the inputs unless it is there.

    Progress goes to standard error. `inputs` as in `documents.find`; none are needed for the name `stdlib`.

    Raises:
        ValueError: for bad inputs; for a corpus of that name made from other inputs, with the difference.
        OSError: when the disk refuses; what was there before is still there.
    """
    folder = tokens.corpus_folder(home, name)
    inputs = tuple(inputs) or ((STDLIB,) if name == STDLIB else ())
    files = documents.find(inputs)
    _tidy(folder)
    made_from = _fingerprint(files, _read_json(folder / "inputs.json"), tokenizer, vocab, text_key)
    if folder.exists() and not force:
        return _existing(folder, made_from)
    own = tokenizers.from_file(tokenizer) if tokenizer else None
    with _new_folder(folder) as place:
        ledger = {
            "name": name,
            "inputs": list(inputs),
            "builder": tokens.BUILDER,
            "argosy": __version__,
            "python": platform.python_version(),
        }
        ledger |= _corpus(place, inputs, files, own, vocab, text_key)
        (place / "inputs.json").write_text(json.dumps(made_from, indent=0), encoding="utf-8")
        return tokens.write_ledger(place, ledger)


def _corpus(
    place: Path, inputs: Sequence[str], files: Sequence[File], own: tokenizers.Tokenizer | None, vocab: int, text_key: str
) -> dict[str, Any]:
    """Read, deduplicate, hold out, tokenize and store; return the ledger's part of it."""
    read, given, left_out = _read(files, text_key)
    kept = list(_deduplicate(read, left_out))
    if not kept:
        raise ValueError(f"no text in {', '.join(inputs)}; left out: {json.dumps(left_out) if left_out else 'nothing'}")
    held_out = hold_out(kept)
    splits: Splits = {document.source: {tokens.TRAIN: [], tokens.HELD_OUT: []} for document in kept}
    for document in sorted(kept, key=lambda d: rank(d.id)):
        splits[document.source][tokens.HELD_OUT if document.id in held_out else tokens.TRAIN].append(document)
    with stage("tokenizer"):
        known = own or tokenizers.train(_sample(splits, vocab), vocab)
    (place / "tokenizer.json").write_text(known.to_str(), encoding="utf-8")
    exact, sources = _store(place, known, splits)
    assert exact or own, "our own vocabulary gives every byte back"
    return {
        "tokenizer": {
            "sha256": tokens.file_checksum(place / "tokenizer.json"),
            "origin": "imported" if own else "trained on this corpus",
            "vocab": tokenizers.vocabulary(known),
            "doc": tokenizers.doc_token(known),
            "dtype": tokenizers.dtype(known).name,
            "byte_exact": exact,
        },
        "sources": {name: {"files": given[name]} | one for name, one in sources.items()},
        "absent": [s for s in documents.STDLIB_SOURCES if s not in sources] if any(map(documents.is_stdlib, inputs)) else [],
        "left_out": {
            source: {reason: {"documents": n, "bytes": b} for reason, (n, b) in reasons.items()}
            for source, reasons in left_out.items()
        },
    }


# ---- reading and choosing ------------------------------------------------------------------------


def _read(files: Sequence[File], text_key: str) -> tuple[list[Document], Counter[str], LeftOut]:
    """Every document, and after them the prose of the standard library's code; files per source; what was left out."""
    read: list[Document] = []
    prose: list[Document] = []
    given: Counter[str] = Counter()
    left_out: LeftOut = {}
    with stage("read", len(files)) as done:
        for file in files:
            before = len(read)
            for found in documents.read(file, text_key):
                if isinstance(found, Skipped):
                    _leave_out(left_out, found.source, found.reason, found.bytes)
                else:
                    read.append(found)
                    said = documents.prose(found) if file.library and file.source in documents.CODE else None
                    prose += [said] if said else []
            given[file.source] += len(read) > before
            done(1)
    given["prose"] += len(prose)
    return read + prose, given, left_out


def _deduplicate(read: Sequence[Document], left_out: LeftOut) -> Iterator[Document]:
    """The documents that say something new; prose of a file that went goes with it."""
    gone: set[str] = set()
    with stage("deduplicate", len(read)) as done:
        for document, reason in zip(read, dedup.duplicates(read), strict=True):
            if not reason and document.id in gone:
                reason = ORPHAN
            if reason:
                gone.add(document.id)
                _leave_out(left_out, document.source, reason, len(document.text.encode()))
            else:
                yield document
            done(1)


def _leave_out(left_out: LeftOut, source: str, reason: str, size: int) -> None:
    count = left_out.setdefault(source, {}).setdefault(reason, [0, 0])
    count[0] += 1
    count[1] += size


def rank(id: str) -> int:
    """A document's place in the order of its corpus: 64 bits of its origin's hash, the same in every build."""
    return int.from_bytes(hashlib.blake2b(id.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def hold_out(kept: Sequence[Document]) -> set[str]:
    """Origins held out: of each source those of lowest rank, until 2.5% of its bytes, or 100 KB, are reached.

    A document above a quarter of that, and above the source's median, always trains: one text alone would say little.
    What comes from one origin falls on one side. A source keeps at least one document to train on.
    """
    sources: dict[str, dict[str, int]] = {}
    for document in kept:
        sources.setdefault(document.source, {})[document.id] = len(document.text.encode())
    target = {
        s: max(HELD_OUT_FRAC * sum(d.values()), min(HELD_OUT_BYTES, HELD_OUT_MOST_FRAC * sum(d.values())))
        for s, d in sources.items()
    }
    large: set[str] = set()
    for source, sizes in sources.items():
        most = max(target[source] / 4, sorted(sizes.values())[len(sizes) // 2])
        large |= {id for id, size in sizes.items() if size > most}
    held: set[str] = set()
    for source, sizes in sources.items():
        enough = sum(size for id, size in sizes.items() if id in held)
        left = len(sizes) - sum(id in held for id in sizes)
        for id in sorted(sizes, key=rank):
            if enough >= target[source] or left <= 1:
                break
            if id not in held and id not in large:
                held.add(id)
                enough += sizes[id]
                left -= 1
    return held


def _sample(splits: Splits, vocab: int) -> Iterator[str]:
    """Training text for the tokenizer, as much of every source (in rank order, so a random part of it)."""
    share = vocab * SAMPLE_BYTES_PER_TOKEN // len(splits)
    for one in splits.values():
        left = share
        for document in one[tokens.TRAIN]:
            if left <= 0:
                break
            yield document.text[:left]
            left -= len(document.text)


# ---- tokens --------------------------------------------------------------------------------------


def _store(place: Path, tokenizer: tokenizers.Tokenizer, splits: Splits) -> tuple[bool, dict[str, Any]]:
    """Tokenize and write every split; return whether the tokens add up to the text's bytes, and the sources' ledger."""
    lengths, doc, exact = tokenizers.byte_lengths(tokenizer), tokenizers.doc_token(tokenizer), True
    sources: dict[str, Any] = {}
    with stage("tokenize", sum(len(d.text) for one in splits.values() for part in one.values() for d in part)) as done:
        for source, one in splits.items():
            sources[source] = {}
            for split, part in one.items():
                if not part:
                    continue
                coded: list[ndarray] = []
                for batch in _batches(part):
                    coded += tokenizers.encode(tokenizer, [d.text for d in batch])
                    done(sum(len(d.text) for d in batch))
                texts = [d.text.encode() for d in part]
                whole = lengths is not None and all(int(lengths[c].sum()) == len(t) for c, t in zip(coded, texts, strict=True))
                exact = exact and whole
                sources[source][split] = tokens.write_split(place, source, split, doc, [d.id for d in part], texts, coded)
    return exact, sources


def _batches(part: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in part:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---- what is there already, and how a corpus appears ---------------------------------------------


def _fingerprint(files: Sequence[File], known: Any, tokenizer: Path | None, vocab: int, text_key: str) -> dict[str, Any]:
    """What a corpus is made from. A file whose size and time are as recorded is not read again."""
    recorded = known["files"] if known else {}
    found = {}
    for file in files:
        stat, key = file.path.stat(), f"{file.source}: {file.id}"
        size, time_ns, checksum = recorded.get(key, (None, None, None))
        if (size, time_ns) != (stat.st_size, stat.st_mtime_ns):
            checksum = tokens.file_checksum(file.path)
        found[key] = [stat.st_size, stat.st_mtime_ns, checksum]
    settings = {"builder": tokens.BUILDER, "text_key": text_key, "vocab": None if tokenizer else vocab, "tokenizer": None}
    if tokenizer and tokenizer.is_file():
        settings["tokenizer"] = tokens.file_checksum(tokenizer)
    return {"settings": settings, "files": found}


def _existing(folder: Path, made_from: dict[str, Any]) -> dict[str, Any]:
    known, ledger = _read_json(folder / "inputs.json"), tokens.open_store(folder).ledger
    if known is None:
        raise ValueError(f"corpus file {folder}/inputs.json is missing or damaged; build it again with --force")
    lines = [
        f"{k} was {known['settings'].get(k)}, now {v}"
        for k, v in made_from["settings"].items()
        if known["settings"].get(k) != v
    ]
    was, now = known["files"], made_from["files"]
    for word, ids in (
        ("new", [k for k in now if k not in was]),
        ("gone", [k for k in was if k not in now]),
        ("changed", [k for k in now if k in was and now[k][2] != was[k][2]]),
    ):
        if ids:
            lines.append(f"{len(ids):,} {word}: {', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''}")
    if lines:
        raise ValueError(
            f"corpus {folder.name!r} is there, made from other inputs ({'; '.join(lines)}); give another --name, or --force to"
            " replace it"
        )
    console().print(f"corpus {folder.name} is there: {folder}", highlight=False, soft_wrap=True)
    return ledger


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its place at the end; after an error nothing has changed."""
    place = folder.parent / f".building-{folder.name}-{os.getpid()}"
    aside = folder.parent / f".replaced-{folder.name}-{os.getpid()}"
    try:
        place.mkdir(parents=True)
        yield place
        if folder.exists():
            folder.rename(aside)
        place.rename(folder)
    except OSError as error:
        raise OSError(
            error.errno, f"corpus {folder.name!r} was not built, nothing has changed: {error.strerror or error}", str(folder)
        ) from error
    finally:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        for left in (place, aside):
            shutil.rmtree(left, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Put right what a killed build left beside a corpus."""
    for left in folder.parent.glob(f".*-{folder.name}-*"):
        kind, _, rest = left.name[1:].partition("-")
        pid = rest.removeprefix(f"{folder.name}-")
        if kind not in ("building", "replaced") or not pid.isdigit() or psutil.pid_exists(int(pid)):
            continue
        if kind == "replaced" and not folder.exists():
            left.rename(folder)
        else:
            shutil.rmtree(left, ignore_errors=True)


# ---- for people ----------------------------------------------------------------------------------


def console() -> rich.console.Console:
    return rich.console.Console(stderr=True)


@contextlib.contextmanager
def stage(label: str, total: int | None = None) -> Iterator[Any]:
    """A stage of the work: a bar on a terminal, else a line when it took more than two seconds. Gives `done(n)`."""
    out, start = console(), time.perf_counter()
    with rich.progress.Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)
    if not out.is_terminal and time.perf_counter() - start > 2:
        out.print(f"{label}: {time.perf_counter() - start:.1f} s", highlight=False)


def table(ledger: Mapping[str, Any]) -> rich.table.Table:
    """The ledger for a terminal of 80 columns: a row per source."""
    made = rich.table.Table(
        title=f"corpus {ledger['name']}",
        caption=f"checksum {ledger['sha256'][:16]}",
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    made.add_column("source", no_wrap=True)
    for title in ("files", "texts", "MB", "tokens", "bytes/token", "held-out KB", "left out"):
        made.add_column(title, justify="right", no_wrap=True)
    nothing = {"documents": 0, "bytes": 0, "tokens": 0}
    for name, one in ledger["sources"].items():
        train, held = one.get(tokens.TRAIN, nothing), one.get(tokens.HELD_OUT, nothing)
        gone = sum(reason["documents"] for reason in ledger["left_out"].get(name, {}).values())
        made.add_row(
            name,
            f"{one['files']:,}",
            f"{train['documents']:,}",
            f"{train['bytes'] / 1e6:.2f}",
            f"{train['tokens']:,}",
            f"{train['bytes'] / max(1, train['tokens']):.2f}",
            f"{held['bytes'] / 1e3:.0f}",
            f"{gone:,}",
        )
    for name in ledger["absent"]:
        made.add_row(name, "absent", *[""] * 6)
    return made
