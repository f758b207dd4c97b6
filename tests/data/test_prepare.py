"""A corpus: whole or not there, nothing twice, nothing held out that also trains, every byte accounted for."""

import errno
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import rich.console

from argosy.data import dedup, documents, prepare, tokens
from argosy.data import tokenizer as tokenizers
from argosy.data.documents import Document


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(count))


def jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def text_of(store, source, split):
    """The documents of a split as its tokens spell them."""
    tokenizer, offsets = store.tokenizer(), store.offsets(source, split)
    stream = store.read(source, split, 0, store.tokens(source, split) + 1)
    assert stream[-1] == store.doc and (stream[offsets] == store.doc).all()
    assert (stream == store.doc).sum() == len(offsets)
    return [tokenizer.decode(stream[a + 1 : b].tolist()) for a, b in itertools.pairwise(offsets)]


# ---- what is in a corpus ------------------------------------------------------------------------


def test_every_document_is_there_once(library, store):
    """Fails when a document is lost, changed or doubled on its way into the store, or a byte is counted twice or not at all."""
    read = [d for file in documents.find([f"stdlib:{library}"]) for d in documents.read(file) if isinstance(d, Document)]
    prose = [documents.prose(d) for d in read if d.source in documents.CODE]
    given = {(d.source, d.id): d.text for d in [*read, *filter(None, prose)]}
    found, gone = (
        {},
        sum(
            r["documents"]
            for s in store.ledger["left_out"].values()
            for n, r in s.items()
            if "dupl" in n or n == prepare.ORPHAN
        ),
    )
    for source in store.sources:
        for split in ("train", "held_out"):
            ids, texts = store.documents(source, split), text_of(store, source, split)
            one = store.ledger["sources"][source][split]
            assert [len(t.encode()) for t in texts] == store.document_bytes(source, split).tolist()
            assert one["documents"] == len(ids) == len(texts)
            assert one["bytes"] == sum(len(t.encode()) for t in texts)
            assert one["tokens"] == store.tokens(source, split)
            for id, text in zip(ids, texts, strict=True):
                assert (source, id) not in found
                found[source, id] = text
    assert all(given[key] == text for key, text in found.items())
    assert len(given) - len(found) == gone


def test_the_ledger_says_what_there_is(store, home):
    """Fails when absent sources are not listed, files are miscounted, or a checksum is not that of what is stored."""
    ledger = store.ledger
    assert list(ledger["sources"]) == ["library", "packages", "topics", "prose"]
    assert ledger["absent"] == ["tests"] and store.sizes["tests"] == 0
    assert ledger["sources"]["topics"]["files"] == 1
    assert ledger["sources"]["library"]["files"] == 40 + 1 - 1  # _sysconfigdata, empty and latin left out, os.py and 39 more in
    assert ledger["left_out"]["packages"]["generated character table"]["documents"] == 1
    folder = home / "corpora" / "small"
    assert hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest() == ledger["tokenizer"]["sha256"]
    for source in store.sources:
        digest = hashlib.sha256(store.read(source, "train", 0, store.sizes[source] + 1).astype("<u2").tobytes())
        digest.update(
            store.offsets(source, "train").astype("<i8").tobytes()
            + store.document_bytes(source, "train").astype("<i8").tobytes()
        )
        assert digest.hexdigest() == ledger["sources"][source]["train"]["sha256"]
    on_disk = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert on_disk == {*ledger["files"], "ledger.json"}
    assert json.loads(json.dumps(ledger)) == ledger
    out = io.StringIO()
    rich.console.Console(width=200, file=out).print(prepare.table(ledger))
    text = out.getvalue()
    assert "absent" in text and f"{store.sizes['library']:,}" in text


def test_a_build_can_be_repeated(library, home, tmp_path):
    """Fails when the same inputs give another corpus on another day, place or order of files."""
    again = prepare.build("small", [f"stdlib:{library}"], tmp_path, vocab=1024)
    assert again == tokens.open_store(home / "corpora" / "small").ledger


def test_held_out_text_never_trains(store):
    """Fails when a file trains while its prose is held out, or a held-out document also trains, in any source."""
    sides = {s: {id for source in store.sources for id in store.documents(source, s)} for s in ("train", "held_out")}
    assert not sides["train"] & sides["held_out"]
    code = set(store.documents("library", "held_out")) | set(store.documents("packages", "held_out"))
    assert set(store.documents("prose", "held_out")) & code  # the rule was put to work
    trained = {text for source in store.sources for text in text_of(store, source, "train")}
    assert not trained & {text for source in store.sources for text in text_of(store, source, "held_out")}


def test_enough_is_held_out_and_not_too_much():
    """Fails when a large source holds out far from 2.5%, a middling one under 100 KB, a small one over 15% and a document."""
    rng = random.Random(0)

    def source(name, count, size):
        return [Document(name, f"{name}/{n}", "x" * rng.randint(size // 2, size * 3 // 2)) for n in range(count)]

    kept = source("large", 4000, 5000) + source("middling", 400, 5000) + source("small", 40, 1000) + source("single", 1, 9000)
    kept += [Document("large", "large/giant", "x" * 900_000)]
    held = prepare.hold_out(kept)

    def share(name):
        sizes = {d.id: len(d.text) for d in kept if d.source == name}
        inside = sum(size for id, size in sizes.items() if id in held)
        return inside, inside / sum(sizes.values())

    assert 0.025 <= share("large")[1] < 0.026
    assert 100_000 <= share("middling")[0] < 107_500
    assert 0.15 <= share("small")[1] < 0.15 + 1500 / 40_000
    assert share("single") == (0, 0)
    assert "large/giant" not in held


def test_exact_and_near_duplicates_go():
    """Fails when a copy, or a copy with a few words changed, stays, or a document that shares less than half goes."""
    rng = random.Random(1)
    text = words(rng, 600)
    changed = text.split()
    for at in rng.sample(
        range(600), 6
    ):  # a changed word touches about 2 x 32 of 3,900 windows: 0.83 of the union stay the same
        changed[at] = "changed"
    half = " ".join(text.split()[:300]) + " " + words(rng, 300)
    spread = text.upper().replace(" ", "\n\t ")
    given = [text, words(rng, 600), text, " ".join(changed), half, spread, "short", "short", "shore"]
    reasons = list(dedup.duplicates(Document("s", f"{n}", t) for n, t in enumerate(given)))
    assert reasons == ["", "", dedup.EXACT, dedup.NEAR, "", dedup.NEAR, "", dedup.EXACT, ""]


def test_one_origin_is_not_its_own_duplicate():
    """Fails when the prose of a file that is nearly all docstring is thrown out as a copy of that file."""
    text = words(random.Random(2), 500)
    both = [Document("library", "a.py", f'"""{text}"""\n'), Document("prose", "a.py", text + "\n")]
    assert list(dedup.duplicates(both)) == ["", ""]
    assert list(dedup.duplicates([both[0], both[1]._replace(id="b.py")])) == ["", dedup.NEAR]


@pytest.mark.parametrize("seed", range(3))
def test_resemblance_is_the_jaccard_index(seed):
    """Fails when the estimate from 256 hashes strays by four standard deviations from the index counted over all windows."""
    rng = random.Random(seed)
    base = words(rng, 4000).split()
    other = list(base)
    for at in rng.sample(range(4000), 90):
        other[at] = words(rng, 1)
    a, b = "".join(base).encode(), "".join(other).encode()
    windows = [{t[i : i + dedup.WINDOW] for i in range(len(t) - dedup.WINDOW + 1)} for t in (a, b)]
    true = len(windows[0] & windows[1]) / len(windows[0] | windows[1])
    assert 0.6 < true < 0.9
    assert abs(dedup.resemblance(dedup.sketch(a), dedup.sketch(b)) - true) < 4 * np.sqrt(true * (1 - true) / 256)


def test_long_documents_are_sketched_as_one():
    """Fails when windows across the boundary of two chunks are lost: a sketch is the smallest hashes of all windows."""
    data = np.random.default_rng(0).integers(97, 122, 200_000, dtype=np.uint8)
    all_at_once = np.unique(dedup._hash_windows(data))[: dedup.SKETCH]
    assert (dedup.sketch(data.tobytes()) == all_at_once).all()


def test_prose_goes_with_its_file(tmp_path):
    """Fails when the prose of a file that was left out as a copy stays (its original may be held out)."""
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "os.py").write_text('"""' + words(random.Random(3), 80) + '"""\n')
    code = "\n".join(f"def {w}(): return {w!r}" for w in words(random.Random(4), 300).split())
    for name, said in (("a", 5), ("b", 6)):
        (lib / f"{name}.py").write_text(f'"""{words(random.Random(said), 60)}"""\n{code}\n')
    left_out = prepare.build("x", [f"stdlib:{lib}"], tmp_path, vocab=300)["left_out"]
    assert left_out["library"][dedup.NEAR]["documents"] == 1
    assert left_out["prose"] == {prepare.ORPHAN: {"documents": 1, "bytes": left_out["prose"][prepare.ORPHAN]["bytes"]}}


# ---- odd inputs ---------------------------------------------------------------------------------


def test_odd_inputs(tmp_path):
    """Fails when emojis, null characters, a literal `<|doc|>`, a huge document or one without line breaks do not come back."""
    rng = random.Random(0)
    texts = [words(rng, 50) for _ in range(30)]
    odd = [
        "<|doc|> not a boundary <|doc|>",
        "\x00\x01\x7f",
        "👩‍👩‍👧‍👦 \u202e עברית\r\n\r\n",
        "x" * 1_500_000,
        "line\n" * 500_000,
        " ",
        "\ufeff",
    ]
    prepare.build("odd", [str(jsonl(tmp_path / "a.jsonl", texts + odd))], tmp_path, vocab=300)
    store = tokens.open_store(tmp_path / "corpora" / "odd", verify=True)
    assert {t for split in ("train", "held_out") for t in text_of(store, "a", split)} == {*texts, *odd} - {" "}
    assert store.ledger["left_out"] == {"a": {"empty": {"documents": 1, "bytes": 1}}}


@pytest.mark.parametrize("body", ["", "\n\n", '{"text": ""}\n'])
def test_no_text_is_no_corpus(tmp_path, body):
    """Fails when an empty corpus is made, or half of one is left behind."""
    (tmp_path / "a.jsonl").write_text(body)
    with pytest.raises(ValueError, match=r"no text in .*a\.jsonl"):
        prepare.build("none", [str(tmp_path / "a.jsonl")], tmp_path)
    assert list((tmp_path / "corpora").iterdir()) == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_bad_names(tmp_path, name):
    """Fails when a corpus can be written outside its folder."""
    with pytest.raises(ValueError, match="corpus name"):
        prepare.build(name, [str(jsonl(tmp_path / "a.jsonl", ["x"]))], tmp_path)


def test_one_document_trains(tmp_path):
    """Fails when a source of one document is held out whole, or opening such a corpus fails."""
    prepare.build("one", [str(jsonl(tmp_path / "a.jsonl", [words(random.Random(0), 500)]))], tmp_path, vocab=300)
    store = tokens.open_store(tmp_path / "corpora" / "one")
    assert store.sources == ("a",) and store.held_out_sources == ()
    with pytest.raises(ValueError, match="source 'a' of corpus 'one' has no split 'held_out'"):
        store.held_out_extent("a")


# ---- whole or not there -------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    rng = random.Random(0)
    path = jsonl(tmp_path / "a.jsonl", [words(rng, 80) for _ in range(60)])
    return tmp_path, path, prepare.build("mine", [str(path)], tmp_path, vocab=300)


def test_a_corpus_that_is_there_is_kept(mine, monkeypatch, capsys):
    """Fails when an unchanged corpus is built again, or its files are read again to know that."""
    home, path, ledger = mine
    monkeypatch.setattr(prepare, "_corpus", None)
    monkeypatch.setattr(tokens, "file_checksum", None)
    assert prepare.build("mine", [str(path)], home, vocab=300) == ledger
    captured = capsys.readouterr()
    assert "corpus mine is there" in captured.err and captured.out == ""
    monkeypatch.undo()
    os.utime(path)  # a new time, the same text
    assert prepare.build("mine", [str(path)], home, vocab=300) == ledger


def test_changed_inputs_are_refused(mine):
    """Fails when a corpus is silently used for other inputs or replaced without --force, or the difference is not said."""
    home, path, ledger = mine
    other = jsonl(home / "b.jsonl", ["more text"])
    with pytest.raises(
        ValueError, match=r"'mine' is there, made from other inputs \(1 new: b: .*b\.jsonl\); give another --name, or --force"
    ):
        prepare.build("mine", [str(path), str(other)], home, vocab=300)
    with pytest.raises(ValueError, match=r"vocab was 300, now 400"):
        prepare.build("mine", [str(path)], home, vocab=400)
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    with pytest.raises(ValueError, match=r"1 changed: a: .*a\.jsonl"):
        prepare.build("mine", [str(path)], home, vocab=300)
    assert tokens.open_store(home / "corpora" / "mine", verify=True).ledger == ledger
    forced = prepare.build("mine", [str(path)], home, vocab=300, force=True)
    assert forced["sha256"] != ledger["sha256"]
    assert tokens.open_store(home / "corpora" / "mine", verify=True).ledger == forced
    assert [p.name for p in (home / "corpora").iterdir()] == ["mine"]


@pytest.mark.parametrize("where", ["write_split", "write_ledger"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
def test_a_failed_build_changes_nothing(mine, monkeypatch, where, error):
    """Fails when a full disk, Ctrl-C or an error part of the way leaves half a corpus or loses the old one."""
    home, path, ledger = mine

    def fail(*_args, **_named):
        raise error

    monkeypatch.setattr(tokens, where, fail)
    for name in ("mine", "new"):
        with pytest.raises(type(error)) as raised:
            prepare.build(name, [str(path)], home, vocab=300, force=True)
        if isinstance(error, OSError):
            assert raised.value.errno == errno.ENOSPC and "was not built, nothing has changed: No space left" in str(
                raised.value
            )
    assert [p.name for p in (home / "corpora").iterdir()] == ["mine"]
    assert tokens.open_store(home / "corpora" / "mine", verify=True).ledger == ledger


def test_a_home_that_cannot_be_written(mine):
    """Fails when a home where no folder can be made is a traceback without the corpus's name."""
    home, path, _ = mine
    (home / "file").write_text("")
    with pytest.raises(OSError, match="corpus 'new' was not built, nothing has changed: Not a directory"):
        prepare.build("new", [str(path)], home / "file", vocab=300)


def test_a_killed_build_leaves_the_old_corpus(mine):
    """Fails when SIGKILL in the middle of a forced build loses the old corpus, or what it left stays for ever."""
    home, path, ledger = mine
    code = "import sys, time, pathlib; from argosy.data import prepare, tokens\n"
    code += "def hang(*a): print('here', flush=True); time.sleep(60)\n"
    code += f"tokens.write_ledger = hang; prepare.build('mine', [{str(path)!r}], pathlib.Path({str(home)!r}),"
    code += " vocab=300, force=True)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "here\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(list((home / "corpora").iterdir())) == 2
    assert prepare.build("mine", [str(path)], home, vocab=300) == ledger
    assert [p.name for p in (home / "corpora").iterdir()] == ["mine"]


def test_a_kill_between_the_renames_is_put_right(mine):
    """Fails when the old corpus, set aside by a build that died before its last rename, does not come back."""
    home, path, ledger = mine
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (home / "corpora" / "mine").rename(home / "corpora" / f".replaced-mine-{child.pid}")
    assert prepare.build("mine", [str(path)], home, vocab=300) == ledger


# ---- the real thing -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("suite", [True, False])
def test_the_running_pythons_library(tmp_path, suite):
    """Fails when the standard library gives under 6 MB or four sources, with or without its suite, or takes a CPU-minute."""
    library = Path(sysconfig.get_path("stdlib"))
    if not suite:
        skip = shutil.ignore_patterns(
            "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "*.so", "*.a", "config-*"
        )
        shutil.copytree(library, tmp_path / "lib", ignore=skip, symlinks=True)
        library = tmp_path / "lib"
    begun = time.process_time()
    ledger = prepare.build("stdlib", [f"stdlib:{library}"], tmp_path)
    assert time.process_time() - begun < 60
    store = tokens.open_store(tmp_path / "corpora" / "stdlib", verify=True)
    assert ledger["tokenizer"]["vocab"] == tokenizers.VOCAB
    total = sum(part["bytes"] for one in ledger["sources"].values() for part in one.values() if isinstance(part, dict))
    assert total > 6_000_000
    assert set(store.sources) >= {"library", "packages", "prose", "topics"}
    if not suite:
        assert ledger["absent"] == ["tests"]
    for source in store.sources:
        train, held = (ledger["sources"][source][split] for split in ("train", "held_out"))
        share = held["bytes"] / (train["bytes"] + held["bytes"])
        assert 2 < train["bytes"] / train["tokens"] < 6
        assert held["bytes"] >= 100_000 or share > 0.14
        assert share < (0.06 if train["bytes"] > 3_000_000 else 0.17)
        assert 1 < store.gzip_bits_per_byte(source) < 4
