"""Which documents say again what an earlier one said: exactly, or nearly.

Two documents are near-duplicates when at least `THRESHOLD` of the 32-byte windows that either has, white space and
case aside, are in both (Jaccard). The share is estimated from each document's 256 smallest window hashes, which
are a random sample of its windows (bottom-k sketches: Broder, 1997; Thorup, 2013): its standard deviation is 0.025
at 0.8, and it is exact for documents with fewer windows. Documents meet when they share one of their six smallest
hashes; at 0.8 fewer than one pair in 10,000 is missed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import UInt64
from numpy import ndarray

from argosy.data.documents import Document

WINDOW, SKETCH, MEETING, THRESHOLD = 32, 256, 6, 0.8
EXACT, NEAR = "exact duplicate", "near duplicate"
_COMPARED = 32  # earlier documents that one is compared with at most: those that share most hashes
_CHUNK = 1 << 16
_LOWER = bytes(b + 32 if 65 <= b <= 90 else b for b in range(256))
_MULTIPLIER = 0x9E3779B97F4A7C15


def sketch(text: bytes) -> UInt64[ndarray, "hashes"]:
    """The smallest hashes of a text's windows, sorted, at most 256; none for a text shorter than a window."""
    data = np.frombuffer(text.translate(_LOWER, b" \t\r\n\f\v"), np.uint8)
    found = np.empty(0, np.uint64)
    for start in range(0, len(data) - WINDOW + 1, _CHUNK):
        hashes = _hash_windows(data[start : start + _CHUNK + WINDOW - 1])
        if len(found) == SKETCH:
            hashes = hashes[hashes < found[-1]]
        found = _distinct(np.concatenate([found, hashes]))[:SKETCH]
    return found


def _distinct(hashes: ndarray) -> ndarray:
    """Sorted, without repetitions. (numpy 2.4's `unique` goes through a hash table, 20 times slower here than a sort.)"""
    hashes = np.sort(hashes)
    return hashes[np.concatenate([[True], hashes[1:] != hashes[:-1]])] if len(hashes) else hashes


def _hash_windows(data: ndarray) -> ndarray:
    """A hash of each window: a polynomial over its bytes, by doubling the width, then mixed."""
    hashes = data.astype(np.uint64)
    width, power = 1, _MULTIPLIER
    while width < WINDOW:
        hashes = hashes[:-width] * np.uint64(power) + hashes[width:]
        width, power = 2 * width, power * power % (1 << 64)
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(_MULTIPLIER)
    return hashes ^ (hashes >> np.uint64(29))


def resemblance(a: UInt64[ndarray, "hashes_a"], b: UInt64[ndarray, "hashes_b"]) -> float:
    """The estimated share of windows that two documents have in common, 0 to 1."""
    union = _distinct(np.concatenate([a, b]))[:SKETCH]
    both = np.intersect1d(a, b, assume_unique=True)
    return float(np.searchsorted(both, union[-1], side="right") / len(union)) if len(union) else 0.0


def duplicates(documents: Iterable[Document]) -> Iterator[str]:
    """For each document in turn `EXACT`, `NEAR`, or "" for one to keep. Documents of the same origin are not compared."""
    known: set[bytes] = set()
    kept: list[tuple[str, int, ndarray]] = []
    meet: dict[int, list[int]] = {}
    for document in documents:
        text = document.text.encode()
        digest = hashlib.sha256(text).digest()
        if digest in known:
            yield EXACT
            continue
        mine = sketch(text)
        candidates = Counter(n for key in mine[:MEETING].tolist() for n in meet.get(key, ()))
        if any(_near(document.id, len(text), mine, kept[n]) for n, _ in candidates.most_common(_COMPARED)):
            yield NEAR
            continue
        known.add(digest)
        for key in mine[:MEETING].tolist():
            meet.setdefault(key, []).append(len(kept))
        kept.append((document.id, len(text), mine))
        yield ""


def _near(id: str, size: int, mine: ndarray, other: tuple[str, int, ndarray]) -> bool:
    if other[0] == id or min(size, other[1]) < 0.5 * max(size, other[1]):
        return False
    return resemblance(mine, other[2]) >= THRESHOLD
