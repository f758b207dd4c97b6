"""The token store: Zarr v3 arrays that TensorStore reads from a disk, S3 or GCS.

A corpus is a folder:

    ledger.json                     what is in it: sources, documents, bytes, tokens, checksums
    inputs.json                     the files it was made from
    tokenizer.json
    <source>/<split>/tokens         every document as `<|doc|>` and its tokens; one `<|doc|>` more closes the array
    <source>/<split>/offsets        int64: where each document begins, and the closing `<|doc|>`
    <source>/<split>/bytes          int64: UTF-8 bytes of each document
    <source>/<split>/documents.json their ids
    <source>/held_out/text          the documents' bytes, one after the other

with the splits `train` and `held_out`. A token count is that of the labels: everything but the array's first
`<|doc|>`, so each document counts its tokens and one `<|doc|>` that ends it.
"""

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import Int, Integer
from numpy import ndarray
from tokenizers import Tokenizer

from argosy import spec
from argosy.data import tokenizer as tokenizers

TRAIN, HELD_OUT = "train", "held_out"
BUILDER = 1  # raised when the same inputs give another corpus
CHUNK, SHARD = 1 << 15, 1 << 25  # values that one read fetches at least; values in one file
RAM_BYTES = 256 << 20  # an array up to this size is read once and kept

# ---- writing -------------------------------------------------------------------------------------


def write_split(
    folder: Path, source: str, split: str, doc: int, ids: Sequence[str], texts: Sequence[bytes], coded: Sequence[ndarray]
) -> dict[str, Any]:
    """Write one split of one source; return its documents, bytes, tokens and the checksum of what was stored."""
    lengths = np.array([len(c) + 1 for c in coded], np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    stream = np.full(int(offsets[-1]) + 1, doc, coded[0].dtype)
    for at, tokens in zip(offsets[:-1].tolist(), coded, strict=True):
        stream[at + 1 : at + 1 + len(tokens)] = tokens
    sizes = np.array([len(t) for t in texts], np.int64)
    place = folder / source / split
    place.mkdir(parents=True)
    digest = hashlib.sha256()
    for name, array in (("tokens", stream), ("offsets", offsets), ("bytes", sizes)):
        _write_array(place / name, array)
        digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    (place / "documents.json").write_text(json.dumps(list(ids)), encoding="utf-8")
    if split == HELD_OUT:
        (place / "text").write_bytes(b"".join(texts))
    return {"documents": len(ids), "bytes": int(sizes.sum()), "tokens": len(stream) - 1, "sha256": digest.hexdigest()}


def _write_array(path: Path, array: ndarray) -> None:
    raw = [{"name": "bytes", "configuration": {"endian": "little"}}]
    chunk = min(CHUNK, 1 << max(0, len(array) - 1).bit_length())
    shard = -(-min(SHARD, len(array)) // chunk) * chunk
    layout = {"chunk_shape": [chunk], "codecs": raw, "index_codecs": [*raw, {"name": "crc32c"}]}
    opened = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {
                "shape": list(array.shape),
                "data_type": array.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard]}},
                "codecs": [{"name": "sharding_indexed", "configuration": layout}],
            },
        },
        create=True,
    ).result()
    opened.write(array).result()


def write_ledger(folder: Path, ledger: dict[str, Any]) -> dict[str, Any]:
    """Complete the ledger with every file's size and checksum and with its own, and write it last."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    data = {"tokenizer": ledger["tokenizer"]["sha256"]} | {
        name: [one[split]["sha256"] for split in (TRAIN, HELD_OUT) if split in one] for name, one in ledger["sources"].items()
    }
    ledger = ledger | {"sha256": _checksum(data), "files": files}
    ledger["ledger_sha256"] = _checksum(ledger)
    (folder / "ledger.json").write_text(json.dumps(ledger, indent=1), encoding="utf-8")
    return ledger


def file_checksum(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---- reading -------------------------------------------------------------------------------------


class Store:
    """An open corpus. Small arrays are read once and kept in memory, larger ones read where asked."""

    def __init__(self, folder: str, ledger: dict[str, Any]):
        self.folder, self.ledger = folder, ledger
        self.sources: tuple[str, ...] = tuple(ledger["sources"])
        self.held_out_sources = tuple(name for name in self.sources if HELD_OUT in ledger["sources"][name])
        training = {name: one.get(TRAIN, {"tokens": 0})["tokens"] for name, one in ledger["sources"].items()}
        self.sizes: dict[str, int] = training | dict.fromkeys(ledger["absent"], 0)
        self.checksum: str = ledger["sha256"]
        self.doc: int = ledger["tokenizer"]["doc"]
        self.vocab: int = ledger["tokenizer"]["vocab"]
        self._open = functools.lru_cache(maxsize=None)(self._array)

    def tokenizer(self) -> Tokenizer:
        return tokenizers.from_json(read_bytes(self.folder, "tokenizer.json").decode())

    def tokens(self, source: str, split: str) -> int:
        """Labels in a split; it stores one token more."""
        return self._split(source, split)["tokens"]

    def read(self, source: str, split: str, start: int, length: int) -> Integer[ndarray, "length"]:
        """Tokens `start` to `start + length - 1` of a split, uint16 or uint32."""
        return self.gather(source, split, [start], length)[0]

    def gather(self, source: str, split: str, starts: Sequence[int], length: int) -> Integer[ndarray, "rows length"]:
        """Spans of equal length, one row each."""
        stored = self.tokens(source, split) + 1
        if min(starts) < 0 or max(starts) + length > stored:
            raise ValueError(
                f"{source}/{split} has tokens 0 to {stored - 1:,}; asked {length:,} from {min(starts):,} to {max(starts):,}"
            )
        array = self._open(source, split, "tokens")
        if isinstance(array, ndarray):
            return array[np.asarray(starts)[:, None] + np.arange(length)[None, :]]
        pending = [array[start : start + length].read() for start in starts]
        return np.stack([one.result() for one in pending])

    def offsets(self, source: str, split: str) -> Int[ndarray, "documents_and_end"]:
        """Where each document's `<|doc|>` is, and the closing one; int64."""
        return self._whole(source, split, "offsets")

    def document_bytes(self, source: str, split: str) -> Int[ndarray, "documents"]:
        """UTF-8 bytes of each document; int64."""
        return self._whole(source, split, "bytes")

    def documents(self, source: str, split: str) -> list[str]:
        """The documents' ids: where each came from."""
        self._split(source, split)
        return json.loads(read_bytes(self.folder, f"{source}/{split}/documents.json"))

    def held_out_extent(self, source: str, limit: int | None = None) -> tuple[int, int]:
        """How much of the held-out text up to `limit` labels cover: (labels, UTF-8 bytes), both exact.

        A tokenizer whose tokens do not add up to the text's bytes covers whole documents only.

        Raises:
            ValueError: when the limit holds no document then, naming the least that does.
        """
        total = self.tokens(source, HELD_OUT)
        labels = total if limit is None else min(limit, total)
        if labels == total:
            return total, self._split(source, HELD_OUT)["bytes"]
        lengths = tokenizers.byte_lengths(self.tokenizer()) if self.ledger["tokenizer"]["byte_exact"] else None
        if lengths is not None:
            return labels, int(lengths[self.read(source, HELD_OUT, 1, labels)].sum())
        ends = self.offsets(source, HELD_OUT)[1:]
        whole = int(np.searchsorted(ends, labels, side="right"))
        if not whole:
            raise ValueError(
                f"evals.tokens_per_set={limit:,} ends inside the first held-out document of {source!r};"
                f" nearest legal {int(ends[0]):,}"
            )
        return int(ends[whole - 1]), int(self.document_bytes(source, HELD_OUT)[:whole].sum())

    def gzip_bits_per_byte(self, source: str, limit: int | None = None) -> float:
        """Bits per byte of `gzip -9` on the held-out text, or on as much of it as `limit` labels cover."""
        text = read_bytes(self.folder, f"{source}/{HELD_OUT}/text")[: self.held_out_extent(source, limit)[1]]
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)  # 31: with gzip's header and trailer
        return 8 * len(packer.compress(text) + packer.flush()) / len(text)

    def _split(self, source: str, split: str) -> dict[str, Any]:
        if source not in self.sources:
            raise ValueError(
                f"corpus {self.ledger['name']!r} has no source {source!r};"
                f" nearest: {', '.join(spec.nearest(source, self.sources))}"
            )
        if split not in self.ledger["sources"][source]:
            raise ValueError(
                f"source {source!r} of corpus {self.ledger['name']!r} has no split {split!r}: it has too few documents, or the"
                f" split is none of {TRAIN}, {HELD_OUT}"
            )
        return self.ledger["sources"][source][split]

    def _array(self, source: str, split: str, name: str) -> Any:
        opened = _open_array(self.folder, f"{source}/{split}/{name}")
        return opened.read().result() if opened.size * opened.dtype.numpy_dtype.itemsize <= RAM_BYTES else opened

    def _whole(self, source: str, split: str, name: str) -> ndarray:
        self._split(source, split)
        found = self._open(source, split, name)
        return found if isinstance(found, ndarray) else found.read().result()


def corpus_folder(home: Path, name: str) -> Path:
    """Where the corpus of a name lies under a home.

    Raises:
        ValueError: for a name that could lead elsewhere, with the nearest legal one.

    >>> corpus_folder(Path("voyages"), "../mine")
    Traceback (most recent call last):
    ValueError: corpus name '../mine' must be letters, digits, '.', '_', '-', not beginning with a sign; nearest legal 'mine'
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        legal = re.sub(r"[^A-Za-z0-9._-]+", "-", name.rstrip("/").rpartition("/")[2]).lstrip("._-") or "mine"
        raise ValueError(
            f"corpus name {name!r} must be letters, digits, '.', '_', '-', not beginning with a sign; nearest legal {legal!r}"
        )
    return home / "corpora" / name


def open_store(folder: Path | str, verify: bool = False) -> Store:
    """The corpus in a folder or at an address (`s3://`, `gs://`, `http://`).

    Opening compares every local file's size with the ledger; `verify` reads every file and compares its checksum.

    Raises:
        ValueError: for a corpus that is not there; for a file that is missing, cut short or changed, with its
            expected and its found checksum.
    """
    folder = str(folder)
    again = "build it again with --force" if "://" not in folder else "copy it again"
    try:
        body = read_bytes(folder, "ledger.json")
    except (FileNotFoundError, NotADirectoryError):
        there = [p.parent.name for p in Path(folder).parent.glob("[!.]*/ledger.json")] if "://" not in folder else []
        hint = f"; nearest: {', '.join(spec.nearest(Path(folder).name, there))}" if there else ""
        raise ValueError(f"{folder} is not a corpus: it has no ledger.json{hint}") from None
    try:
        ledger = json.loads(body)
        expected = ledger.pop("ledger_sha256")
        found = _checksum(ledger)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"corpus file {folder}/ledger.json is damaged: not the ledger that a build wrote; {again}") from None
    if found != expected:
        raise ValueError(f"corpus file {folder}/ledger.json is changed: checksum {found}, expected {expected}; {again}")
    if ledger["builder"] > BUILDER:
        raise ValueError(
            f"corpus {folder} was built by version {ledger['builder']}, this one reads up to {BUILDER}; upgrade argosy"
        )
    for name, file in ledger["files"].items():
        _check_file(folder, name, file["bytes"], file["sha256"], verify, again)
    return Store(folder, ledger | {"ledger_sha256": expected})


def _check_file(folder: str, name: str, size: int, checksum: str, verify: bool, again: str) -> None:
    local = "://" not in folder
    if not (local or verify):
        return
    try:
        if not verify and (Path(folder) / name).stat().st_size == size:
            return
        body = read_bytes(folder, name)
    except FileNotFoundError:
        raise ValueError(f"corpus file {folder}/{name} is missing; expected checksum {checksum}; {again}") from None
    found = hashlib.sha256(body).hexdigest()
    if found != checksum:
        how = f"has {len(body):,} bytes of {size:,}" if len(body) != size else "is changed"
        raise ValueError(f"corpus file {folder}/{name} {how}: checksum {found}, expected {checksum}; {again}")


def check(run: spec.Run, store: Store) -> None:
    """Refuse a model that does not know all of the corpus's tokens.

    Raises:
        ValueError: with both sizes.
    """
    if run.model.vocab < store.vocab:
        raise ValueError(
            f"model.vocab={run.model.vocab:,} is smaller than the {store.vocab:,} tokens of corpus {store.ledger['name']!r};"
            f" nearest legal model.vocab={store.vocab:,}, or a multiple of what the mesh divides"
        )


def read_bytes(folder: str, name: str) -> bytes:
    """A file of a corpus, from a disk or through TensorStore.

    Raises:
        FileNotFoundError: if it is not there.
    """
    if "://" not in folder:
        return (Path(folder) / name).read_bytes()
    found = ts.KvStore.open(folder.rstrip("/") + "/").result().read(name).result()
    if found.state != "value":
        raise FileNotFoundError(f"{folder}/{name}")
    return bytes(found.value)


def _open_array(folder: str, name: str) -> Any:
    place = f"{folder.rstrip('/')}/{name}/" if "://" in folder else {"driver": "file", "path": f"{folder}/{name}/"}
    return ts.open({"driver": "zarr3", "kvstore": place}, open=True, read=True).result()
