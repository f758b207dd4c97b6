"""What goes into a step: the one value that the data room makes and the model room reads."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Packed sequences of whole documents, each stored as `<|doc|>` and then its tokens.

    The label of a position is the next token; that of a document's last token is the next document's `<|doc|>`,
    so every byte of text is predicted exactly once, and `<|doc|>` ends it. Arrays live on the host (numpy) or on
    the mesh.
    """

    tokens: Any  # B S, int32
    labels: Any  # B S, int32
    doc_start: Any  # B S, int32: where in the sequence this token's document begins, 0 if before it
    valid: Any  # B S, bool: False for padding, which has no loss and is not routed
