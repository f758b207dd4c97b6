"""Readers: what becomes a document, what is left out and why, and what is refused."""

import ast
import gzip
import importlib
import inspect
import json
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from argosy.data import documents
from argosy.data.documents import Document, Skipped


def read(*inputs, **options):
    return [found for file in documents.find([str(i) for i in inputs]) for found in documents.read(file, **options)]


def lines(path: Path, *rows) -> Path:
    body = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return path


# ---- the standard library -----------------------------------------------------------------------


def test_a_distributions_library_has_four_sources(library):
    """Fails when a library without its suite gives other sources, or its odd files get in or vanish without a reason."""
    found = read(f"stdlib:{library}")
    sources = {d.source for d in found if isinstance(d, Document)}
    assert sources == {"library", "packages", "topics"}  # and prose, made of the first two
    assert {(s.id, s.reason) for s in found if isinstance(s, Skipped)} >= {
        ("latin.py", "not UTF-8 text"),
        ("empty.py", "empty"),
        ("encodings/cp1252.py", "generated character table"),
        ("_sysconfigdata__x.py", "describes one build of Python"),
        ("test/test_support.py", "the test suite is not installed"),
    }
    ids = {d.id: d for d in found if isinstance(d, Document)}
    assert ids["encodings/idna.py"].source == "packages"
    assert ids["heapq.py"].text == (library / "heapq.py").read_text(encoding="utf-8")
    assert not any("topics.py" in id or id.startswith("test") for id in ids)


def test_the_suite_is_a_source_where_it_is_installed(tmp_path):
    """Fails when an installed suite is missed, or the tests of a package count as its code."""
    (tmp_path / "os.py").write_text("x = 1\n")
    for name in [*(f"test/test_{n}.py" for n in range(documents.SUITE_FILES)), "unittest/test/util.py", "unittest/case.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("y = 2\n")
    by_id = {d.id: d.source for d in read(f"stdlib:{tmp_path}")}
    assert by_id["test/test_7.py"] == by_id["unittest/test/util.py"] == "tests"
    assert by_id["unittest/case.py"] == "packages"
    (tmp_path / "test" / "test_0.py").unlink()
    assert {d.source for d in read(f"stdlib:{tmp_path}") if isinstance(d, Document)} == {"library", "packages"}


def test_topics_are_pydocs(library):
    """Fails when a help topic is missing or is not the text that pydoc shows."""
    from pydoc_data.topics import topics

    found = {d.id: d.text for d in read(f"stdlib:{library}") if d.source == "topics"}
    assert found == {f"topics/{name}": text for name, text in topics.items()}


def test_prose_is_docstrings_and_comments():
    """Fails when code gets into the prose, when a string's inside is taken for a comment, or comments lose their paragraphs."""
    code = textwrap.dedent('''
        #!/usr/bin/env python
        # -*- coding: utf-8 -*-
        """The module's summary, which is long enough to be kept, says what it does."""
        import os  # a trailing remark
        URL = "http://x/#fragment"
        QUERY = """
        # not a comment, but a part of a string
        """

        # A first paragraph of comments
        # which goes on here.

        # A second one, apart from it.
        # ---------------
        def f(x):
            r"""Doubles x.

            A line.
                An indented line with a \\backslash and "quotes".
            """
            # inside the function, a comment
            return "it's # not one", '"""', x * 2
        class C:
            \'\'\'Single quotes are docstrings too, and are kept as well.\'\'\'
    ''')
    found = documents.prose(Document("library", "a/b.py", code))
    assert found == Document(
        "prose",
        "a/b.py",
        "The module's summary, which is long enough to be kept, says what it does.\n\n"
        "A first paragraph of comments\nwhich goes on here.\n\n"
        "A second one, apart from it.\n---------------\n\n"
        'Doubles x.\n\nA line.\n    An indented line with a \\backslash and "quotes".\n\n'
        "inside the function, a comment\n\n"
        "Single quotes are docstrings too, and are kept as well.\n",
    )
    assert documents.prose(Document("library", "a.py", "x = 1  # short\n")) is None


@pytest.mark.parametrize("module", ["json", "random", "difflib"])
def test_every_docstring_of_a_real_module_is_in_its_prose(module):
    """Fails when a triple-quoted docstring that Python's own parser finds is missing from the prose."""
    source = Path(importlib.import_module(module).__file__).read_text(encoding="utf-8")
    found = documents.prose(Document("library", module, source)).text
    defined = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    written = [ast.get_source_segment(source, n.body[0].value) for n in defined if ast.get_docstring(n)]
    said = [inspect.cleandoc(text.lstrip("rR")[3:-3]) for text in written if text.endswith(('"""', "'''"))]
    assert len(said) >= 4
    assert all(text in found for text in said)


def test_no_library_there(tmp_path):
    """Fails when any folder is taken for a Python's library."""
    with pytest.raises(ValueError, match=r"not a Python's standard library: it has no os\.py"):
        read(f"stdlib:{tmp_path}")
    assert Path(sysconfig.get_path("stdlib"), "os.py").exists()


# ---- a user's own files -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["web.jsonl", "web.jsonl.gz", "web.ndjson"])
def test_jsonl(tmp_path, name):
    """Fails when a line becomes other text, blank lines count as documents, or line numbers in ids slip."""
    path = lines(
        tmp_path / name,
        {"text": "one\nline", "n": 1},
        "",
        {"text": "zwei \u2028 drei"},
        "   ",
        {"text": " "},
        {"text": "\ud800"},
    )
    kind = tmp_path.name + "/" + name
    assert read(path) == [
        Document("web", f"{kind}:1", "one\nline"),
        Document("web", f"{kind}:3", "zwei \u2028 drei"),
        Skipped("web", f"{kind}:5", "empty", 1),
        Skipped("web", f"{kind}:6", "half a surrogate pair", 1),
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"text": "a"', r"line 3 is not JSON: Expecting ',' delimiter"),
        ("{'text': 1}", "line 3 is not JSON"),
        ("[" * 100_000, "line 3 is not JSON"),
        (
            '{"body": "a", "id": 7}',
            r"line 3 has the keys 'body', 'id'; it must be an object whose 'text' is a string; another key: --text-key",
        ),
        ('{"text": null}', "line 3 has the keys 'text'"),
        ('["text"]', "line 3 is a list"),
    ],
)
def test_bad_lines_are_named(tmp_path, row, says):
    """Fails when a bad line is skipped in silence or is not named by its number."""
    path = lines(tmp_path / "a.jsonl", {"text": "fine"}, "", row)
    with pytest.raises(ValueError, match=says):
        read(path)


def test_another_text_key(tmp_path):
    """Fails when the key that the user names is not the one read."""
    path = lines(tmp_path / "a.jsonl", {"body": "this", "text": "that"})
    assert [d.text for d in read(path, text_key="body")] == ["this"]


def test_cut_gzip_is_named(tmp_path):
    """Fails when half a download gives half a corpus or a traceback of the gzip module."""
    whole = lines(tmp_path / "a.jsonl.gz", *({"text": f"{n:x}" * 50} for n in range(1000))).read_bytes()
    for body in (whole[: len(whole) // 2], b"not gzip at all", whole[:200] + b"\0" * 50 + whole[250:]):
        (tmp_path / "a.jsonl.gz").write_bytes(body)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz"):
            read(tmp_path / "a.jsonl.gz")


def test_plain_files_and_folders(tmp_path):
    """Fails when a folder's files get other sources than documented, hidden files get in, or a binary is taken for text."""
    (tmp_path / "books" / "old").mkdir(parents=True)
    (tmp_path / "books" / ".git").mkdir()
    (tmp_path / "books" / "a.txt").write_text("\ufeffA book.", encoding="utf-8")
    (tmp_path / "books" / "old" / "b.md").write_text("An old one.")
    (tmp_path / "books" / "c.bin").write_bytes(b"\x7fELF\x00\x01")
    (tmp_path / "books" / "d.txt").write_bytes(b"caf\xe9")
    (tmp_path / "books" / "e.txt").write_text("")
    (tmp_path / "books" / ".git" / "x").write_text("hidden")
    lines(tmp_path / "books" / "web-00001-of-00002.jsonl", {"text": "w"})
    lines(tmp_path / "books" / "web-00002-of-00002.jsonl", {"text": "v"})
    found = read(tmp_path / "books")
    assert {(d.source, d.id, d.text) for d in found if isinstance(d, Document)} == {
        ("books", "books/a.txt", "A book."),
        ("old", "books/old/b.md", "An old one."),
        ("web", "books/web-00001-of-00002.jsonl:1", "w"),
        ("web", "books/web-00002-of-00002.jsonl:1", "v"),
    }
    assert {(s.id, s.reason) for s in found if isinstance(s, Skipped)} == {
        ("books/c.bin", "not UTF-8 text"),
        ("books/d.txt", "not UTF-8 text"),
        ("books/e.txt", "empty"),
    }
    assert {d.source for d in read(f"mine={tmp_path / 'books'}")} == {"mine"}
    with pytest.raises(ValueError, match=r"c\.bin is not UTF-8 text \(byte 4\)"):
        read(tmp_path / "books" / "c.bin")
    with pytest.raises(ValueError, match=r"d\.txt is not UTF-8 text \(byte 3\)"):
        read(tmp_path / "books" / "d.txt")


def test_a_huge_plain_file_is_cut_at_blank_lines(tmp_path):
    """Fails when a file of many megabytes is one document that no split can divide, or loses text where it is cut."""
    paragraph = "A paragraph of text.\n" * 40 + "\n"
    (tmp_path / "huge.txt").write_text(paragraph * 2500)
    found = read(tmp_path / "huge.txt")
    each = -(-(documents.PART_BYTES + 2) // len(paragraph))  # paragraphs whose end is the first at or after PART_BYTES
    assert len(found) == -(-2500 // each) == len({d.id for d in found})
    assert "".join(d.text for d in found) == paragraph * 2500
    assert all(d.text.endswith("\n\n") for d in found)
    (tmp_path / "line.txt").write_text("x" * 3_000_000)
    assert [len(d.text) for d in read(tmp_path / "line.txt")] == [3_000_000]


def test_inputs_that_are_not_there(tmp_path):
    """Fails when a misspelt path is an empty corpus."""
    with pytest.raises(ValueError, match="input 'nowhere' does not exist; an input is a file, a folder, stdlib"):
        documents.find(["nowhere"])
    with pytest.raises(ValueError, match="no file in"):
        documents.find([str(tmp_path)])
    with pytest.raises(ValueError, match="no file in no input"):
        documents.find([])


def test_a_file_given_twice(tmp_path):
    """Fails when overlapping inputs put the same text in twice, or two files share an id."""
    for folder in ("a/x", "b/x"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "t.txt").write_text(folder)
    with pytest.raises(
        ValueError, match=r"would both be 'x/t.txt' of source 'x'; give each file once, and name the sources: a="
    ):
        documents.find([str(tmp_path / "a/x"), str(tmp_path / "b/x")])
    with pytest.raises(ValueError, match="give each file once"):
        documents.find([str(tmp_path / "a/x"), str(tmp_path / "a/x/t.txt")])
    assert len(documents.find([f"one={tmp_path / 'a/x'}", f"two={tmp_path / 'b/x'}"])) == 2


def test_parquet_without_its_extra(tmp_path, monkeypatch):
    """Fails when parquet without daft is a traceback, or does not say what to install."""
    monkeypatch.setitem(sys.modules, "daft", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"parquet needs the extra `data`: pip install argosy\[data\]"):
        read(tmp_path / "a.parquet")


def test_parquet(tmp_path):
    """Fails when daft's rows are not the documents."""
    daft = pytest.importorskip("daft")
    daft.from_pydict({"text": ["one", "two", None], "n": [1, 2, 3]}).write_parquet(str(tmp_path / "web"))
    (path,) = (tmp_path / "web").glob("*.parquet")
    path = path.rename(tmp_path / "web-0.parquet")
    assert [d.text for d in read(path) if isinstance(d, Document)] == ["one", "two"]
    with pytest.raises(ValueError, match="has the columns text, n, not 'body'"):
        read(path, text_key="body")
