"""Where the line of a registered forecast was published: `0001.witness.json` beside it, a list that grows."""

import json
import time
from pathlib import Path

from argosy.judge import register
from argosy.judge.fits import Body
from argosy.track import layout


def note(home: Path, name: str, where: str) -> Body:
    """The entry that is added for where the newest forecast's line was published.

    The note proves nothing itself: it says where to look for the hash and its date.

    Raises:
        ValueError: when nothing is registered, nothing is said, or the note is damaged: it is left as it is.
    """
    body = register.newest(home, name)
    if body is None:
        raise ValueError(f"no forecast of {name!r} is registered; argosy forecast register {name}")
    where = where.strip()
    if not where or len(where) > 2000 or not where.isprintable():
        raise ValueError("--at WHERE is a URL, a commit, a tag or words in one line, up to 2,000 characters")
    entry = {"at": where, "noted": register.stamp(time.time()), "sha256": body["sha256"]}
    layout.write_json(path_of(home, body), {"witnesses": [*noted(home, body), entry]})
    register.show_page(home, body)
    return entry


def path_of(home: Path, body: Body) -> Path:
    return register.folder_of(home, body["name"]) / f"{body['number']:04d}.witness.json"


def noted(home: Path, body: Body) -> list[Body]:
    """Where the line of a forecast was published, as noted; those of another hash are none.

    Raises:
        ValueError: when the file of the notes is damaged.
        OSError: when it cannot be read.
    """
    path = path_of(home, body)
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_bytes())["witnesses"]
        own = [entry for entry in found if entry["sha256"] == body["sha256"]]
        if not all(isinstance(entry["at"], str) for entry in own):
            raise ValueError("a witness says no place")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{path} is damaged ({what}); the forecast beside it is untouched. Bring it back, or move it away and note the witness again"
        ) from error
    return own
