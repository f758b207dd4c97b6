"""The tokenizer: a byte-level BPE of one's own, or any `tokenizer.json`."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

DOC = "<|doc|>"
VOCAB = 4096
PIECE_CHARS = 1 << 20  # longer documents are tokenized in pieces, so that threads share the work
_DOC_CANDIDATES = (DOC, "<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

# Letters with the one sign before them; up to three digits; other signs with the line break and indentation that
# follow; white space. On the standard library 3.8 bytes per token at 4,096, where GPT-2's pattern gives 3.4, and 0.5%
# fewer bits per byte under a 4-gram model of 1.2M tokens. No piece is longer than 128 characters: the time to train on
# one grows with the square of its length.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,64}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,32}[ \t]{0,64}"
    r"|[\r\n]{1,32}[ \t]{0,64}|\s{1,64}(?!\S)|\s{1,64}"
)


def train(texts: Iterable[str], vocab: int = VOCAB) -> Tokenizer:
    """A byte-level BPE of at most `vocab` tokens; token 0 is `<|doc|>`. It gives back any text unchanged.

    Raises:
        ValueError: for a vocabulary that does not hold the 256 bytes and `<|doc|>`.
    """
    if not 257 <= vocab <= 1 << 20:
        raise ValueError(
            f"a vocabulary of {vocab:,} tokens: 257 (the bytes and {DOC}) to 1,048,576;"
            f" nearest {min(max(vocab, 257), 1 << 20):,}"
        )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[DOC], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return from_json(made.to_str())


def from_file(path: Path) -> Tokenizer:
    """Any `tokenizer.json`. Its own begin- or end-of-text token starts a document; else `<|doc|>` is added.

    Raises:
        ValueError: for a file that is missing or is no tokenizer.
    """
    try:
        made = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"tokenizer {path} does not exist; it must be a tokenizer.json") from None
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer {path} is no tokenizer.json: {error}") from None
    if all(made.token_to_id(name) is None for name in _DOC_CANDIDATES):
        made.add_special_tokens([DOC])
    return made


def from_json(text: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`. Special tokens written out in a text stay text; nothing is cut or padded."""
    made = Tokenizer.from_str(text)
    made.encode_special_tokens = True
    made.no_truncation()
    made.no_padding()
    return made


def doc_token(tokenizer: Tokenizer) -> int:
    """The token that starts a document."""
    return next(i for name in _DOC_CANDIDATES if (i := tokenizer.token_to_id(name)) is not None)


def vocabulary(tokenizer: Tokenizer) -> int:
    """Tokens that a model needs to know: the highest id and one."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def byte_lengths(tokenizer: Tokenizer) -> Int[ndarray, "V"] | None:
    """UTF-8 bytes that each token stands for, int64, 0 for special tokens; None if the tokenizer is not byte-level.

    >>> byte_lengths(train(["ab ab ab"], 258))[:2].tolist()
    [0, 1]
    """
    body = json.loads(tokenizer.to_str())
    if (body.get("decoder") or {}).get("type") != "ByteLevel":
        return None
    lengths = np.zeros(vocabulary(tokenizer), np.int64)
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        lengths[i] = len(token)  # the byte-level alphabet has one character per byte
    for added in body["added_tokens"]:
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return lengths


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[ndarray]:
    """Each text's tokens, without `<|doc|>`; uint16 or uint32 by the vocabulary. All cores take part."""
    kind = dtype(tokenizer)
    pieces, owner = [], []
    for n, text in enumerate(texts):
        for piece in _pieces(text):
            pieces.append(piece)
            owner.append(n)
    found: list[list[ndarray]] = [[] for _ in texts]
    for n, coded in zip(owner, tokenizer.encode_batch_fast(pieces, add_special_tokens=False), strict=True):
        found[n].append(np.array(coded.ids, kind))
    return [parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, kind), *parts]) for parts in found]


def dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if vocabulary(tokenizer) <= 1 << 16 else np.uint32)


def _pieces(text: str) -> Iterable[str]:
    """The text cut after line breaks before each PIECE_CHARS (or there, in a line that is longer)."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1
        cut = cut if cut > start else start + PIECE_CHARS
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]
