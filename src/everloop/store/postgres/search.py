"""Search over past conversations in PostgreSQL: a text search vector per message, next to the log.

As with SQLite, turns write nothing here, and a search first indexes new entries. The vectors are built from the words
of `store/search.py`, so that both stores find the same; PostgreSQL stems English words, intersects and ranks.
"""

from __future__ import annotations

import hashlib
import time
import unicodedata
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..base import Found
from ..search import MAX_TERMS, Batch, Lag, Query, Text, found_of, next_batches

if TYPE_CHECKING:
    from .connect import Connection

T = TypeVar("T")
MAX_WORD = 200  # characters that are used
MAX_POSITION = 16_383  # in PostgreSQL: text beyond that is found, but not as a phrase
MAX_BYTES = 900_000  # of a vector; PostgreSQL allows a megabyte
COUNTED = 2_000  # texts with a word; beyond that it is a common word anyway

BEHIND = """SELECT * FROM (
        SELECT s.id, coalesce(c.seq, 0) AS seq, coalesce(c.untrusted, false),
            (SELECT max(seq) FROM entry WHERE session = s.id) AS last
        FROM session s LEFT JOIN search_cursor c ON c.session = s.id WHERE s.owner = %s) AS lag
    WHERE last > seq ORDER BY id"""  # a fork has a higher id than its source, and so comes later
ENTRIES = "SELECT seq, at, kind, data FROM entry WHERE session = %s AND seq > %s AND seq <= %s ORDER BY seq LIMIT %s"
CURSOR = """INSERT INTO search_cursor (session, seq, untrusted) VALUES (%s, %s, %s)
    ON CONFLICT (session) DO UPDATE SET seq = excluded.seq, untrusted = excluded.untrusted
    WHERE search_cursor.seq = %s RETURNING seq"""
# The entries of a fork have the position, time and data of their source.
ADD = """INSERT INTO search_entry (owner, session, seq, at, untrusted, words)
    SELECT %s, %s, t.seq, t.at, t.untrusted, t.words
    FROM unnest(%s::bigint[], %s::float8[], %s::boolean[], %s::tsvector[], %s::text[])
        WITH ORDINALITY AS t (seq, at, untrusted, words, data, n)
    WHERE NOT EXISTS (SELECT 1 FROM search_entry f JOIN entry e ON e.session = f.session AND e.seq = f.seq
        WHERE f.owner = %s AND f.at = t.at AND f.seq = t.seq AND e.data = t.data)
    ORDER BY t.n"""
STEMS = "SELECT w, (ts_lexize('everloop_stem', w))[1] FROM unnest(%s::text[]) AS w"
# A rare word scores higher than a common one, a short text higher than a long one, and a new text up to a quarter
# higher, half of that after a month.
RANKED = f"""WITH term AS MATERIALIZED (
        SELECT t.q, ln(1 + {COUNTED}.0 / (1 + (SELECT count(*) FROM (SELECT 1 FROM search_entry f
            WHERE f.words @@ (%(mine)s::tsquery && t.q) LIMIT {COUNTED}) AS texts))) AS weight
        FROM unnest(%(terms)s::tsquery[]) AS t (q))
    SELECT f.id FROM search_entry f
    WHERE f.owner = %(owner)s AND f.words @@ (%(mine)s::tsquery && %(query)s::tsquery)
    ORDER BY (SELECT sum(ts_rank(f.words, term.q, 1) * term.weight) FROM term)
        * (1 + 0.25 / (1 + greatest(0, %(now)s - f.at) / 2592000.0)) DESC, f.at DESC, f.id DESC
    LIMIT %(limit)s"""
WHOLE = """SELECT s.key, e.turn, e.at, e.kind, e.data, f.untrusted, f.seq
    FROM unnest(%s::bigint[]) WITH ORDINALITY AS wanted (id, n) JOIN search_entry f ON f.id = wanted.id
    JOIN session s ON s.id = f.session JOIN entry e ON e.session = f.session AND e.seq = f.seq
    WHERE s.owner = %s ORDER BY wanted.n"""


class Runs(Protocol):
    """Runs work on a connection, off the event loop."""

    def __call__(self, work: Callable[[Connection], T], /) -> Awaitable[T]: ...


async def search(read: Runs, write: Runs, owner: str, query: str, limit: int) -> list[Found]:
    """Find messages in all sessions of an owner, best match first."""
    words = Query(query)
    if limit < 1 or not words:
        return []
    while not await _caught_up(read, write, owner):
        pass  # another search is indexing concurrently
    return await read(lambda db: list(_find(db, owner, words, limit)))


# ---------------------------------------------------------------------------------------------- finding


def _find(db: Connection, owner: str, query: Query, limit: int) -> Iterator[Found]:
    """Find texts with all the words, then texts with any of them."""
    stems = _stems(db, (word for part, unspaced in query.parts if not unspaced for word in _words(part)))
    every = [term for part, unspaced in query.parts if (term := _as_it_stands(part, unspaced, stems))]
    some = (term for part, unspaced in query.parts for term in _loosened(part, unspaced, stems))
    terms = list(islice(dict.fromkeys(some), MAX_TERMS))
    if not terms:
        return
    ids: dict[int, None] = {}
    for expression in (" & ".join(every), " | ".join(terms)):
        if len(ids) < limit:
            mine = _lexeme(_mark(owner))
            wanted = {"owner": owner, "mine": mine, "terms": terms, "query": expression}
            found = db.execute(RANKED, {**wanted, "now": time.time(), "limit": limit}).fetchall()
            ids |= dict.fromkeys(id for (id,) in found)
    yield from map(found_of, db.execute(WHOLE, (list(ids)[:limit], owner)).fetchall())


def _as_it_stands(part: str, unspaced: bool, stems: dict[str, str]) -> str:
    """Return the term for a part of the query: its words as a phrase, or a run of characters."""
    if not unspaced:
        return _phrase([stems.get(word, word) for word in _words(part)])
    return f"{_lexeme(_plain(part))}:*" if len(part) == 1 else _phrase(_words(" ".join(_pairs(part))))


def _loosened(part: str, unspaced: bool, stems: dict[str, str]) -> list[str]:
    if not unspaced:
        return [_lexeme(stems.get(word, word)) for word in _words(part)]
    return [_as_it_stands(pair, True, stems) for pair in _pairs(part) or [part]]


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(len(run) - 1)]


def _phrase(words: list[str]) -> str:
    return f"({' <-> '.join(map(_lexeme, words))})" if words else ""


def _lexeme(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _mark(owner: str) -> str:
    """Return a term for the owner that no text contains: words do not start with a slash."""
    return "/" + hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- indexing


def _words(text: str) -> list[str]:
    """Return the words of a folded text, without accents."""
    if text.isascii():
        parted = "".join(one if one.isalnum() else " " for one in text)
    else:
        parted = "".join(one if unicodedata.category(one)[0] in "LMN" else " " for one in text)
    return [word for one in parted.split() if (word := _plain(one))]


def _plain(word: str) -> str:
    word = word[:MAX_WORD]
    if word.isascii():
        return word
    parts = unicodedata.normalize("NFD", word)
    return unicodedata.normalize("NFC", "".join(one for one in parts if not "\u0300" <= one <= "\u036f"))


def _stems(db: Connection, words: Iterable[str]) -> dict[str, str]:
    """Return the stems of the English words."""
    english = [word for word in dict.fromkeys(words) if word.isascii() and word.isalpha() and len(word) > 2]
    return {word: stem or word for word, stem in db.execute(STEMS, (english,)).fetchall()} if english else {}


def _vector(words: list[str], stems: dict[str, str], owner: str) -> str:
    """Return the words with their positions, in the syntax of a tsvector."""
    places: dict[str, list[int]] = {_mark(owner): []}
    size = 0
    for place, word in enumerate(words, start=1):
        word = stems.get(word, word)
        if word not in places:
            size += len(word.encode()) + 8
            if size > MAX_BYTES:
                break
            places[word] = []
        if len(at := places[word]) < 250 and place < MAX_POSITION:
            at.append(place)
            size += 2
    return " ".join(_lexeme(word) + (":" + ",".join(map(str, at)) if at else "") for word, at in places.items())


async def _caught_up(read: Runs, write: Runs, owner: str) -> bool:
    """Index new entries. Return False if another search has indexed some of them in the meantime."""
    behind = deque(await read(lambda db: [Lag(*row) for row in db.execute(BEHIND, (owner,)).fetchall()]))
    while behind:
        batches = await read(partial(_read_batches, owner=owner, behind=behind))
        try:
            await write(partial(_add, owner=owner, batches=batches))
        except _Overtaken:
            return False
    return True


def _read_batches(db: Connection, owner: str, behind: deque[Lag]) -> list[tuple[Batch, list[str]]]:
    """Return batches of the log with the vectors of their texts. A retry must read the same: `behind` changes last."""
    ahead = deque(behind)

    def entries_of(lag: Lag, most: int) -> list[Any]:
        return db.execute(ENTRIES, (lag.session, lag.seq, lag.last, most)).fetchall()

    batches = next_batches(entries_of, ahead)
    words = {id(text): _words(text.text) for batch in batches for text in batch.texts}
    stems = _stems(db, (word for some in words.values() for word in some))
    made = [(batch, [_vector(words[id(text)], stems, owner) for text in batch.texts]) for batch in batches]
    behind.clear()
    behind.extend(ahead)
    return made


def _add(db: Connection, owner: str, batches: list[tuple[Batch, list[str]]]) -> None:
    """Index a batch, unless another search has done so in the meantime."""
    for batch, vectors in batches:
        if db.execute("SELECT 1 FROM session WHERE id = %s FOR KEY SHARE", (batch.session,)).fetchone() is None:
            continue  # it was deleted in the meantime
        # The cursor first: its row is the lock between two searches.
        if db.execute(CURSOR, (batch.session, batch.until, batch.untrusted, batch.after)).fetchone() is None:
            raise _Overtaken
        if batch.texts:
            _add_texts(db, owner, batch.session, batch.texts, vectors)


def _add_texts(db: Connection, owner: str, session: int, texts: list[Text], vectors: list[str]) -> None:
    seqs, times = [text.seq for text in texts], [text.at for text in texts]
    untrusted, data = [text.untrusted for text in texts], [text.data for text in texts]
    db.execute(ADD, (owner, session, seqs, times, untrusted, vectors, data, owner))


class _Overtaken(Exception):
    """Another search has indexed some of it; the transaction is rolled back."""
