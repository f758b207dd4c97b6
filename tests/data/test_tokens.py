"""Tokenizer and token store: text comes back, files are what the ledger says, held-out bytes are exact."""

import functools
import gzip
import http.server
import json
import re
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from argosy import spec, voyage
from argosy.data import prepare, tokens
from argosy.data import tokenizer as tokenizers

TEXTS = [f"def f{n}(x):\n    return [x, {n}, 'ünïcödé', \"{n * n}\"]  # the {n}th of them\n\n\n" for n in range(300)]


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return tokenizers.train(TEXTS, 400)


# ---- the tokenizer ------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back_and_bytes_add_up(own, text):
    """Fails when some text does not survive encoding and decoding, or a token's byte length is wrong."""
    (coded,) = tokenizers.encode(own, [text])
    assert coded.dtype == np.uint16
    assert own.decode(coded.tolist()) == text
    assert tokenizers.byte_lengths(own)[coded].sum() == len(text.encode())
    assert tokenizers.doc_token(own) == 0 not in coded


def test_doc_written_out_is_text(own):
    """Fails when a document can end itself by spelling the boundary's name."""
    (coded,) = tokenizers.encode(own, ["a<|doc|>b"])
    assert 0 not in coded and own.decode(coded.tolist()) == "a<|doc|>b"


def test_training_is_repeatable_and_compresses(own):
    """Fails when threads or hash seeds change the vocabulary, or no merges are learnt."""
    assert tokenizers.train(TEXTS, 400).to_str() == own.to_str()
    assert tokenizers.vocabulary(own) == 400
    coded = tokenizers.encode(own, TEXTS)
    assert sum(map(len, coded)) < sum(len(t.encode()) for t in TEXTS) / 2.5


def test_long_texts_are_cut_and_put_together(own, monkeypatch):
    """Fails when a piece of a document that is tokenized in pieces is lost or pieces of two documents mix."""
    monkeypatch.setattr(tokenizers, "PIECE_CHARS", 100)
    texts = ["", "".join(TEXTS[:20]), "x" * 950, TEXTS[0]]
    coded = tokenizers.encode(own, texts)
    assert [own.decode(c.tolist()) for c in coded] == texts
    assert [c.dtype for c in coded] == [np.uint16] * 4


@pytest.mark.parametrize("vocab", [0, 256, 10**7])
def test_impossible_vocabularies(vocab):
    """Fails when a vocabulary that cannot hold the bytes is trained."""
    with pytest.raises(ValueError, match=r"257 .* to 1,048,576; nearest (257|1,048,576)"):
        tokenizers.train(TEXTS, vocab)


def test_any_byte_level_tokenizer_is_imported(own, tmp_path):
    """Fails when an imported tokenizer adds its own beginnings, cuts or pads documents, or its document token is not used."""
    body = json.loads(own.to_str())
    body["added_tokens"][0]["content"] = "<|endoftext|>"
    body["model"]["vocab"] = {("<|endoftext|>" if k == "<|doc|>" else k): v for k, v in body["model"]["vocab"].items()}
    theirs = Tokenizer.from_str(json.dumps(body))
    theirs.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    theirs.enable_truncation(8)
    theirs.enable_padding(length=64)
    theirs.save(str(tmp_path / "tokenizer.json"))
    made = tokenizers.from_file(tmp_path / "tokenizer.json")
    assert (tokenizers.doc_token(made), tokenizers.vocabulary(made)) == (0, 400)
    assert [c.tolist() for c in tokenizers.encode(made, TEXTS[:3])] == [c.tolist() for c in tokenizers.encode(own, TEXTS[:3])]


def test_a_large_vocabulary_takes_uint32_and_a_new_doc(tmp_path):
    """Fails when tokens above 65,535 wrap around in the store, or a tokenizer without a boundary token gets none."""
    vocab = {f"w{n}": n for n in range(70_000)}
    theirs = Tokenizer(models.WordLevel(vocab | {"?": 70_000}, unk_token="?"))
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" ".join(vocab))
    ledger = prepare.build("big", [str(tmp_path / "a.txt")], tmp_path, tokenizer=tmp_path / "tokenizer.json")
    store = tokens.open_store(tmp_path / "corpora" / "big", verify=True)
    assert (store.doc, store.vocab) == (70_001, 70_002)
    assert ledger["tokenizer"] | {"sha256": ""} == {
        "sha256": "", "origin": "imported", "vocab": 70_002, "doc": 70_001, "dtype": "uint32", "byte_exact": False,
    }  # fmt: skip
    (source,) = store.sources
    assert store.read(source, "train", 0, 70_002).tolist() == [70_001, *range(70_000), 70_001]


def test_a_tokenizer_that_is_none(tmp_path):
    """Fails when a wrong path or file is a traceback."""
    (tmp_path / "a.txt").write_text("text")
    for name, body, says in (
        ("no.json", None, "does not exist"),
        ("bad.json", "{}", "is no tokenizer.json"),
        ("x.json", "\x00", "is no tokenizer.json"),
    ):
        if body is not None:
            (tmp_path / name).write_text(body)
        with pytest.raises(ValueError, match=says):
            prepare.build("mine", [str(tmp_path / "a.txt")], tmp_path, tokenizer=tmp_path / name)


# ---- the store ----------------------------------------------------------------------------------


def test_reads_are_slices_of_one_stream(store, monkeypatch):
    """Fails when a read from TensorStore, a read from memory and a gather differ, or a read passes the end."""
    stored = store.tokens("library", "train") + 1
    whole = store.read("library", "train", 0, stored)
    assert whole.dtype == np.uint16
    starts = [0, 1, 12_345, tokens.CHUNK - 10, stored - 65]
    monkeypatch.setattr(tokens, "RAM_BYTES", 0)
    cold = tokens.open_store(store.folder)
    for one in (store, cold):
        assert (one.gather("library", "train", starts, 65) == np.stack([whole[s : s + 65] for s in starts])).all()
        assert (one.offsets("library", "train") == store.offsets("library", "train")).all()
        for start, length in ((-1, 5), (stored - 64, 65)):
            with pytest.raises(ValueError, match="library/train has tokens 0 to"):
                one.read("library", "train", start, length)


def test_several_files_per_array(tmp_path, monkeypatch):
    """Fails when an array that is cut into several files and chunks does not come back as it was."""
    monkeypatch.setattr(tokens, "SHARD", 4096)
    monkeypatch.setattr(tokens, "CHUNK", 256)
    array = np.random.default_rng(0).integers(0, 60_000, 10_000).astype(np.uint16)
    tokens._write_array(tmp_path / "x", array)
    assert len([p for p in (tmp_path / "x" / "c").rglob("*") if p.is_file()]) == 3
    opened = tokens._open_array(str(tmp_path), "x")
    assert (opened.read().result() == array).all()
    assert (opened[4090:4100].read().result() == array[4090:4100]).all()


def test_a_store_behind_http(store, tmp_path):
    """Fails when a corpus can only be read from a local disk (object stores go through the same TensorStore code)."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=store.folder)
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        there = tokens.open_store(f"http://127.0.0.1:{server.server_port}/", verify=True)
        assert there.ledger == store.ledger
        assert (there.read("prose", "train", 100, 500) == store.read("prose", "train", 100, 500)).all()
        assert there.gzip_bits_per_byte("prose") == store.gzip_bits_per_byte("prose")
        with pytest.raises(ValueError, match="is not a corpus: it has no ledger"):
            tokens.open_store(f"http://127.0.0.1:{server.server_port}/nowhere")
        server.shutdown()
        thread.join()


@pytest.fixture
def copy(store, tmp_path):
    shutil.copytree(store.folder, tmp_path / "small")
    return tmp_path / "small"


def test_a_missing_file_is_named(copy):
    """Fails when a corpus with a file missing opens."""
    (copy / "prose" / "train" / "offsets" / "zarr.json").unlink()
    with pytest.raises(
        ValueError,
        match=r"corpus file .*prose/train/offsets/zarr.json is missing; expected checksum [0-9a-f]{64}; build it again",
    ):
        tokens.open_store(copy)


def test_a_truncated_file_is_named(copy, store):
    """Fails when a corpus with half a file opens, even without reading all of it."""
    path = copy / "library" / "train" / "tokens" / "c" / "0"
    path.write_bytes(path.read_bytes()[:1000])
    expected = store.ledger["files"]["library/train/tokens/c/0"]
    with pytest.raises(
        ValueError,
        match=rf"tokens/c/0 has 1,000 bytes of {expected['bytes']:,}: checksum [0-9a-f]+, expected {expected['sha256']}",
    ):
        tokens.open_store(copy)


def test_a_changed_file_is_named(copy):
    """Fails when one flipped bit in the tokens passes the check that training begins with."""
    path = copy / "library" / "train" / "tokens" / "c" / "0"
    body = bytearray(path.read_bytes())
    body[4000] ^= 1
    path.write_bytes(body)
    tokens.open_store(copy)
    with pytest.raises(ValueError, match=r"library/train/tokens/c/0 is changed: checksum [0-9a-f]{64}, expected [0-9a-f]{64}"):
        tokens.open_store(copy, verify=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[: len(t) // 2], "ledger.json is damaged"),
        (lambda t: "[]", "ledger.json is damaged"),
        (
            lambda t: t.replace('"tokens": ', '"tokens": 1', 1),
            "ledger.json is changed: checksum [0-9a-f]{64}, expected [0-9a-f]{64}",
        ),
    ],
)
def test_a_changed_ledger_is_named(copy, change, says):
    """Fails when the ledger itself can be cut or edited unnoticed."""
    path = copy / "ledger.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=says):
        tokens.open_store(copy)


def test_a_later_version_is_refused(copy, monkeypatch):
    """Fails when a corpus of a later version is read as if it were this one's."""
    monkeypatch.setattr(tokens, "BUILDER", 0)
    with pytest.raises(ValueError, match="was built by version 1, this one reads up to 0"):
        tokens.open_store(copy)


def test_a_corpus_that_is_not_there(copy):
    """Fails when a misspelt corpus is a traceback, or the ones that are there are not named."""
    with pytest.raises(ValueError, match=r"smal is not a corpus: it has no ledger.json; nearest: small"):
        tokens.open_store(copy.parent / "smal")
    with pytest.raises(ValueError, match="no source 'libary'; nearest: library"):
        tokens.open_store(copy).tokens("libary", "train")
    (copy.parent / "half").mkdir()
    (copy.parent / "file").write_text("")
    for name in ("half", "file"):
        with pytest.raises(ValueError, match=rf"{name} is not a corpus: it has no ledger.json; nearest: small$"):
            tokens.open_store(copy.parent / name)


@pytest.mark.parametrize(
    ("name", "legal"), [("", "mine"), ("../corpora/stdlib", "stdlib"), ("/etc", "etc"), (".my own", "my-own"), ("..", "mine")]
)
def test_a_run_reads_only_corpora_of_its_home(tmp_path, pocket, name, legal):
    """Fails when `data.corpus` leads out of the home's corpora, or to all of them, or the legal name is not said."""
    run = replace(pocket, data=replace(pocket.data, corpus=name))
    with pytest.raises(ValueError, match=rf"corpus name {re.escape(repr(name))} must be .* nearest legal '{legal}'$"):
        voyage.corpus(run, spec.Host(home=tmp_path, name="try"))


def test_a_model_with_too_few_tokens(store, pocket):
    """Fails when tokens above the embedding table would be clamped to its last row in silence."""
    tokens.check(pocket, store)
    with pytest.raises(ValueError, match=r"model\.vocab=1,023 is smaller than the 1,024 tokens of corpus 'small'"):
        tokens.check(spec.override(pocket, ["model.vocab=1023"]), store)


# ---- held-out text ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["library", "packages", "prose", "topics"])
def test_held_out_extent_is_exact(store, source):
    """Fails when the bytes of a limited evaluation are not those of the text its labels spell, to the byte."""
    total = store.tokens(source, "held_out")
    stream = store.read(source, "held_out", 1, total)
    alphabet = {c: b for b, c in enumerate(_byte_alphabet())}
    vocabulary = {i: bytes(alphabet[c] for c in t) if t != "<|doc|>" else b"" for t, i in store.tokenizer().get_vocab().items()}
    spelt = [vocabulary[i] for i in stream.tolist()]
    text = tokens.read_bytes(store.folder, f"{source}/held_out/text")
    assert b"".join(spelt) == text
    for limit in (1, 100, 2500, total, total + 5, None):
        labels, size = store.held_out_extent(source, limit)
        assert labels == min(total, limit or total)
        assert size == len(b"".join(spelt[:labels]))
        if size > 20:
            assert store.gzip_bits_per_byte(source, limit) == 8 * len(gzip.compress(text[:size], 9, mtime=0)) / size


def _byte_alphabet():
    """GPT-2's printable stand-ins for the 256 bytes, by its rule: printable Latin-1 stays, the others follow from 256 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    after = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(after)) for b in range(256)]


def test_lossy_tokenizers_cover_whole_documents(tmp_path):
    """Fails when bytes of a tokenizer that does not keep them are guessed instead of taken from whole documents."""
    theirs = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "<s>": 3}, unk_token="?"))
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs.normalizer = normalizers.Lowercase()
    theirs.decoder = decoders.WordPiece()
    theirs.save(str(tmp_path / "tokenizer.json"))
    texts = [f"{'A b ' * n}é{n}" for n in range(1, 300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    prepare.build("lossy", [str(tmp_path / "a.jsonl")], tmp_path, tokenizer=tmp_path / "tokenizer.json")
    store = tokens.open_store(tmp_path / "corpora" / "lossy")
    held = [texts[int(id.rpartition(":")[2]) - 1] for id in store.documents("a", "held_out")]
    lengths = [len(t.split()) + 1 for t in held]
    assert store.doc == 3 and len(held) > 4
    for whole in (1, 3, len(held)):
        for extra in (0, 1):
            limit = sum(lengths[:whole]) + extra
            assert store.held_out_extent("a", limit) == (sum(lengths[:whole]), len("".join(held[:whole]).encode()))
    with pytest.raises(ValueError, match=rf"ends inside the first held-out document of 'a'; nearest legal {lengths[0]}"):
        store.held_out_extent("a", lengths[0] - 1)
