"""Text from where it lies: Python's own library, jsonl, parquet and plain files, as documents with a source and an id."""

import ast
import contextlib
import gzip
import inspect
import json
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

STDLIB = "stdlib"
CODE = ("library", "packages")  # top-level modules; those of subpackages
STDLIB_SOURCES = (*CODE, "prose", "topics", "tests")
SUITE_FILES = 100  # fewer files named test_*.py under test/ are not the test suite
WHOLE_BYTES, PART_BYTES = 1 << 20, 1 << 18  # a plain text file above the first is cut at blank lines into such parts
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}
_SHARD = re.compile(r"[-_.](\d+|part|shard|of)(?=[-_.]|$)", re.I)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Document(NamedTuple):
    """A text. Documents with the same `id` come from the same origin (a file and the prose taken from it)."""

    source: str
    id: str
    text: str


class Skipped(NamedTuple):
    """Something that was left out, and why."""

    source: str
    id: str
    reason: str
    bytes: int


class File(NamedTuple):
    """An input file: its documents' source, its id, where it lies; whether the user named it; whether it is the stdlib's.

    `skip` is a reason not to read it.
    """

    source: str
    id: str
    path: Path
    named: bool = False
    library: bool = False
    skip: str = ""


# ---- which files ---------------------------------------------------------------------------------


def find(inputs: Sequence[str]) -> list[File]:
    """The files of the inputs, in a fixed order.

    An input is a file, a folder, `stdlib` (the running Python's library) or `stdlib:FOLDER` (another's);
    `NAME=PATH` names the source. Else a jsonl or parquet file's source is its name without shard numbers, and a
    plain file's is its folder's; a folder's subfolders are sources of their own.

    Raises:
        ValueError: for an input that does not exist or holds no file; for two files with one id.
    """
    found: list[File] = []
    for text in inputs:
        name, sign, rest = text.partition("=")
        asked, path = (name, rest) if sign and _NAME.fullmatch(name) else (None, text)
        if is_stdlib(path):
            found += _stdlib_files(Path(path.partition(":")[2] or sysconfig.get_path("stdlib")))
            continue
        place = Path(path)
        if place.is_file():
            found.append(File(asked or _source(place), _id(asked, place.absolute().parent.name, place.name), place, True))
        elif place.is_dir():
            root = place.resolve()
            for child in sorted(p for p in root.rglob("*") if p.is_file()):
                inside = child.relative_to(root)
                if not any(part.startswith(".") or part == "__pycache__" for part in inside.parts):
                    source = asked or (_safe(inside.parts[0]) if len(inside.parts) > 1 else _source(child))
                    found.append(File(source, _id(asked, root.name, inside.as_posix()), child))
        else:
            raise ValueError(f"input {path!r} does not exist; an input is a file, a folder, {STDLIB} or {STDLIB}:FOLDER")
    if not found:
        raise ValueError(
            f"no file in {', '.join(inputs) or 'no input'}; give files (.jsonl, .parquet, text, also .gz), folders or {STDLIB}"
        )
    seen: dict[tuple[str, str], Path] = {}
    for file in found:
        other = seen.setdefault((file.source, file.id), file.path)
        if other is not file.path:
            raise ValueError(
                f"{other} and {file.path} would both be {file.id!r} of source {file.source!r}; give each file once,"
                f" and name the sources: a={other} b={file.path}"
            )
    return found


def is_stdlib(text: str) -> bool:
    """Whether an input is a Python's own library."""
    return text == STDLIB or text.startswith(STDLIB + ":")


def _source(path: Path) -> str:
    kind = _kind(path)
    return _safe(_SHARD.sub("", kind.stem) or kind.stem) if kind.suffix in _READERS else _safe(path.absolute().parent.name)


def _kind(path: Path) -> Path:
    """The path without `.gz`, whose suffix says how to read it."""
    return path.with_suffix("") if path.suffix == ".gz" else path


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-") or "text"


def _id(asked: str | None, folder: str, inside: str) -> str:
    return f"{asked or folder}/{inside}"


def _stdlib_files(library: Path) -> list[File]:
    """The library's Python files by source; `topics` is one file of pydoc's."""
    if not (library / "os.py").is_file():
        raise ValueError(
            f"{library} is not a Python's standard library: it has no os.py; nearest: {sysconfig.get_path('stdlib')}"
        )
    found = []
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if _NOT_LIBRARY & set(inside.parts) or not path.is_file():
            continue
        if inside.as_posix() == "pydoc_data/topics.py":
            source = "topics"
        elif _TESTS & set(inside.parts[:-1]):
            source = "tests"
        else:
            source = "library" if len(inside.parts) == 1 else "packages"
        found.append(File(source, inside.as_posix(), path, library=True))
    suite = sum(file.source == "tests" and file.path.name.startswith("test_") for file in found)
    reason = "" if suite >= SUITE_FILES else "the test suite is not installed"
    return [file._replace(skip=reason) if file.source == "tests" else file for file in found]


# ---- what is in them -----------------------------------------------------------------------------


def read(file: File, text_key: str = "text") -> Iterator[Document | Skipped]:
    """The documents of a file, and what was left out of it.

    Raises:
        ValueError: for a file that its name or the user says is text and is not, with the line or the byte.
    """
    suffix = _kind(file.path).suffix
    if file.skip:
        yield Skipped(file.source, file.id, file.skip, file.path.stat().st_size)
    elif file.library and file.source == "topics":
        yield from _topics(file)
    elif suffix in _READERS:
        yield from _READERS[suffix](file, text_key)
    else:
        yield from _plain(file)


def _plain(file: File) -> Iterator[Document | Skipped]:
    with _opened(file) as stream:
        body = stream.read()
    try:
        text = body.decode("utf-8-sig")
        wrong = body.find(b"\0") if b"\0" in body else None
    except UnicodeDecodeError as error:
        text, wrong = "", error.start
    reason = "not UTF-8 text" if wrong is not None else "" if text.strip() else "empty"
    reason = reason or _junk(file, text)
    if reason == "not UTF-8 text" and file.named:
        raise ValueError(f"{file.path} is not UTF-8 text (byte {wrong:,}); convert it, or leave it out")
    if reason:
        yield Skipped(file.source, file.id, reason, len(body))
    elif len(body) <= WHOLE_BYTES:
        yield Document(file.source, file.id, text)
    else:
        for n, part in enumerate(_parts(text)):
            yield Document(file.source, f"{file.id}#{n:05}", part)


def _junk(file: File, text: str) -> str:
    """Why a file of the standard library is no text to learn from."""
    if not file.library:
        return ""
    if file.id.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
        return "generated character table"
    if file.path.name.startswith("_sysconfigdata"):
        return "describes one build of Python"
    return ""


def _parts(text: str) -> Iterator[str]:
    """The text cut after blank lines, about PART_BYTES characters each."""
    start = 0
    while len(text) - start > PART_BYTES:
        cut = text.find("\n\n", start + PART_BYTES)
        if cut < 0:
            break
        yield text[start : cut + 2]
        start = cut + 2
    yield text[start:]


def _jsonl(file: File, text_key: str) -> Iterator[Document | Skipped]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file.path} line {number:,}"
            try:
                body = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error.msg} at character {error.pos + 1:,}") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
            if not isinstance(body, dict) or not isinstance(body.get(text_key), str):
                has = f"has the keys {', '.join(map(repr, body))}" if isinstance(body, dict) else f"is a {type(body).__name__}"
                raise ValueError(f"{where} {has}; it must be an object whose {text_key!r} is a string; another key: --text-key")
            yield _checked(file, f"{file.id}:{number}", body[text_key])


def _parquet(file: File, text_key: str) -> Iterator[Document | Skipped]:
    try:
        import daft
    except ImportError:
        raise ValueError(f"{file.path}: parquet needs the extra `data`: pip install argosy[data]") from None
    table = daft.read_parquet(str(file.path))
    if text_key not in table.column_names:
        raise ValueError(
            f"{file.path} has the columns {', '.join(table.column_names)}, not {text_key!r}; another one: --text-key"
        )
    for number, row in enumerate(table.select(text_key).iter_rows(), 1):
        yield _checked(file, f"{file.id}:{number}", row[text_key] or "")


def _checked(file: File, id: str, text: str) -> Document | Skipped:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return Skipped(file.source, id, "half a surrogate pair", len(text))
    return Document(file.source, id, text) if text.strip() else Skipped(file.source, id, "empty", size)


_READERS = {".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}


@contextlib.contextmanager
def _opened(file: File) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(file.path) if file.path.suffix == ".gz" else file.path.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file.path} is not a whole gzip file: {error}") from None


# ---- prose and topics of the standard library ----------------------------------------------------


def _topics(file: File) -> Iterator[Document | Skipped]:
    """pydoc's help topics, each a document."""
    for node in ast.parse(file.path.read_text(encoding="utf-8")).body:
        target: Any = getattr(node, "targets", [getattr(node, "target", None)])[0]
        if isinstance(node, ast.Assign | ast.AnnAssign) and getattr(target, "id", "") == "topics" and node.value:
            for name, text in ast.literal_eval(node.value).items():
                yield _checked(file, f"topics/{name}", text)


_STRING_OR_COMMENT = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'(?:[^'\\\n]|\\.)*'"
    r"|#[^\n]*",
    re.S,
)
_ALONE = re.compile(r"[ \t]*[rRuU]?")
LEAST_PROSE_BYTES = 200


def prose(document: Document) -> Document | None:
    """The docstrings and comments of a Python file as running text, or None where there are hardly any.

    Taken are triple-quoted strings and comments that begin a line; comments on consecutive lines are a paragraph.

    >>> prose(Document("library", "a.py", "x = '# no'\\ndef f():\\n    '''Say it" + 200 * "." + "'''")).text[:6]
    'Say it'
    """
    text, end = document.text, -1
    paragraphs: list[str] = []
    comment: list[str] = []

    def close() -> None:
        block = "\n".join(comment).strip()
        if len(re.findall(r"[A-Za-z]{2,}", block)) >= 3:
            paragraphs.append(block)
        comment.clear()

    for match in _STRING_OR_COMMENT.finditer(text):
        start, token = match.start(), match.group()
        alone = _ALONE.fullmatch(text, text.rfind("\n", 0, start) + 1, start) is not None
        if token[0] == "#":
            if not alone or token.startswith("#!") or "-*-" in token:
                continue
            if comment and text[end:start].strip(" \t") != "\n":
                close()
            comment.append(token.lstrip("#").removeprefix(" ").rstrip())
            end = match.end()
        elif alone and token[:3] in ('"""', "'''"):
            close()
            paragraphs.append(inspect.cleandoc(token[3:-3]))
    close()
    found = "\n\n".join(p for p in paragraphs if p) + "\n"
    return Document("prose", document.id, found) if len(found.encode()) >= LEAST_PROSE_BYTES else None
