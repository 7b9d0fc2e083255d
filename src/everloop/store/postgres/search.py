"""Search over what was said, in PostgreSQL: a text search vector for each message, beside the log.

As with SQLite, a turn writes nothing here: the index is brought up to date when somebody searches. The vectors are put
together from our own words, as `words.py` cuts them, so that both stores find the same; PostgreSQL takes off the
English endings, intersects and ranks.
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
from ..pieces import Lag, Piece, Text, next_pieces, said
from ..words import MAX_TERMS, Query

if TYPE_CHECKING:
    from .connecting import Connection

T = TypeVar("T")
LONGEST_WORD = 200  # characters that count
MAX_POSITION = 16_383  # of PostgreSQL: what stands behind it in a text is found, but not as a phrase
MAX_BYTES = 900_000  # of a vector, which may have a megabyte
COUNTED = 2_000  # texts with a word; with more of them it is a common one anyway

BEHIND = """SELECT * FROM (
        SELECT s.id, coalesce(c.seq, 0) AS seq, coalesce(c.untrusted, false),
            (SELECT max(seq) FROM entry WHERE session = s.id) AS last
        FROM session s LEFT JOIN search_cursor c ON c.session = s.id WHERE s.owner = %s) AS lag
    WHERE last > seq ORDER BY id"""  # a fork has a higher id than what it was copied from, and so comes later
ENTRIES = "SELECT seq, at, kind, data FROM entry WHERE session = %s AND seq > %s AND seq <= %s ORDER BY seq LIMIT %s"
CURSOR = """INSERT INTO search_cursor (session, seq, untrusted) VALUES (%s, %s, %s)
    ON CONFLICT (session) DO UPDATE SET seq = excluded.seq, untrusted = excluded.untrusted
    WHERE search_cursor.seq = %s RETURNING seq"""
# A fork's copies have the place, time and data of what they were copied from.
ADD = """INSERT INTO search_entry (owner, session, seq, at, untrusted, words)
    SELECT %s, %s, t.seq, t.at, t.untrusted, t.words
    FROM unnest(%s::bigint[], %s::float8[], %s::boolean[], %s::tsvector[], %s::text[])
        WITH ORDINALITY AS t (seq, at, untrusted, words, data, n)
    WHERE NOT EXISTS (SELECT 1 FROM search_entry f JOIN entry e ON e.session = f.session AND e.seq = f.seq
        WHERE f.owner = %s AND f.at = t.at AND f.seq = t.seq AND e.data = t.data)
    ORDER BY t.n"""
STEMS = "SELECT w, (ts_lexize('everloop_stem', w))[1] FROM unnest(%s::text[]) AS w"
# A word counts the more, the fewer texts have it; a text, the shorter it is; what is new up to a fourth more, and half
# of that after a month.
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
    """What was said to and by the agent in all sessions of an owner, best first."""
    words = Query(query)
    if limit < 1 or not words:
        return []
    while not await _caught_up(read, write, owner):
        pass  # somebody else is at it too
    return await read(lambda db: list(_find(db, owner, words, limit)))


# ---------------------------------------------------------------------------------------------- what is found


def _find(db: Connection, owner: str, query: Query, limit: int) -> Iterator[Found]:
    """Texts with all the words, then texts with any of them."""
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
    for key, turn, at, kind, data, untrusted, seq in db.execute(WHOLE, (list(ids)[:limit], owner)).fetchall():
        role, text = said(kind, data) or ("assistant", "")
        yield Found(key, turn, at, role, text, untrusted, seq)


def _as_it_stands(part: str, unspaced: bool, stems: dict[str, str]) -> str:
    """A term for a part of the query: its words one after another, or a run of characters."""
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
    """A word that stands for the owner, and that nobody can say: no word of a text begins with a slash."""
    return "/" + hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- what is indexed


def _words(text: str) -> list[str]:
    """The words of a folded text, without accents."""
    if text.isascii():
        parted = "".join(one if one.isalnum() else " " for one in text)
    else:
        parted = "".join(one if unicodedata.category(one)[0] in "LMN" else " " for one in text)
    return [word for one in parted.split() if (word := _plain(one))]


def _plain(word: str) -> str:
    word = word[:LONGEST_WORD]
    if word.isascii():
        return word
    parts = unicodedata.normalize("NFD", word)
    return unicodedata.normalize("NFC", "".join(one for one in parts if not "\u0300" <= one <= "\u036f"))


def _stems(db: Connection, words: Iterable[str]) -> dict[str, str]:
    """English words without their endings; any other word has none here."""
    english = [word for word in dict.fromkeys(words) if word.isascii() and word.isalpha() and len(word) > 2]
    return {word: stem or word for word, stem in db.execute(STEMS, (english,)).fetchall()} if english else {}


def _vector(words: list[str], stems: dict[str, str], owner: str) -> str:
    """The words with their places, as PostgreSQL reads a vector."""
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
    """Index what is new. False when another search did some of it at the same time: then look again."""
    behind = deque(await read(lambda db: [Lag(*row) for row in db.execute(BEHIND, (owner,)).fetchall()]))
    while behind:
        pieces = await read(partial(_read_pieces, owner=owner, behind=behind))
        try:
            await write(partial(_add, owner=owner, pieces=pieces))
        except _Overtaken:
            return False
    return True


def _read_pieces(db: Connection, owner: str, behind: deque[Lag]) -> list[tuple[Piece, list[str]]]:
    """Pieces of the log and the vectors of their texts. Tried again, it must read the same: the list changes last."""
    ahead = deque(behind)

    def entries_of(lag: Lag, most: int) -> list[Any]:
        return db.execute(ENTRIES, (lag.session, lag.seq, lag.last, most)).fetchall()

    pieces = next_pieces(entries_of, ahead)
    words = {id(text): _words(text.text) for piece in pieces for text in piece.texts}
    stems = _stems(db, (word for some in words.values() for word in some))
    made = [(piece, [_vector(words[id(text)], stems, owner) for text in piece.texts]) for piece in pieces]
    behind.clear()
    behind.extend(ahead)
    return made


def _add(db: Connection, owner: str, pieces: list[tuple[Piece, list[str]]]) -> None:
    """Put what was read into the index, unless somebody has done it since."""
    for piece, vectors in pieces:
        # The cursor first: its row is what two who index at once meet at.
        if db.execute(CURSOR, (piece.session, piece.until, piece.untrusted, piece.after)).fetchone() is None:
            raise _Overtaken
        if piece.texts:
            _add_texts(db, owner, piece.session, piece.texts, vectors)


def _add_texts(db: Connection, owner: str, session: int, texts: list[Text], vectors: list[str]) -> None:
    seqs, times = [text.seq for text in texts], [text.at for text in texts]
    untrusted, data = [text.untrusted for text in texts], [text.data for text in texts]
    db.execute(ADD, (owner, session, seqs, times, untrusted, vectors, data, owner))


class _Overtaken(Exception):
    """Another search has indexed some of it; what this one was about to write is undone."""
