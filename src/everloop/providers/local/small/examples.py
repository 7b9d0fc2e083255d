"""Worked examples for small models: what a person asks, the calls that do it with their results, and the answer.

A small model copies what it sees, so these say which tool fits, how its arguments look, and that an answer is short
and says only what a result said. `FIXED` stand in every prompt; of `NEAREST` those that look like the
request.
"""

from __future__ import annotations

from collections.abc import Iterator

from .example import Example, Step, edit, listing, read, run, talk, use, write
from .examples_changes import CHANGES
from .examples_files import FILES
from .examples_talk import TALK
from .examples_work import WORK

_BOAT = "name = Heron\nlength = 9\nhull = steel"

FIXED: tuple[Example, ...] = (
    talk("hello!", "Hello! What can I do for you?"),
    listing(
        "what's in this folder?",
        "plants/\nseeds/\nferns.md  120 B\nsoil.txt  61 B\nwater.csv  88 B\nweather.log  2 kB",
        "",
    ),
    read(
        "what does ferns.md say about light?",
        "ferns.md",
        "# Ferns\nlight: shade only\nwater: daily",
        "Ferns want shade only.",
    ),
    write("make a file pond.txt with the text two frogs", "pond.txt", "two frogs\n", "I created pond.txt."),
    run(
        "add the line moss to garden/list.txt", "echo 'moss' >> garden/list.txt", "", "I added moss to garden/list.txt."
    ),
    edit(
        "in ferns.md change daily to weekly",
        "ferns.md",
        "# Ferns\nlight: shade only\nwater: daily",
        "water: daily",
        "water: weekly",
        "ferns.md says weekly now.",
    ),
    edit("set the hull to oak in boat.ini", "boat.ini", _BOAT, "hull = steel", "hull = oak", "The hull is oak now."),
    run("rename pond.txt to lake.txt", "mv pond.txt lake.txt", "", "It is called lake.txt now."),
    use(
        "where is the word beetle used?",
        "grep",
        "plants/pests.md:3:the beetle eats leaves",
        "In plants/pests.md, line 3.",
        pattern="beetle",
    ),
    run("how many lines has water.csv?", "wc -l < water.csv", "14", "water.csv has 14 lines."),
    talk("what is the capital of Norway?", "The capital of Norway is Oslo."),
    Example(
        "find the length in boat.ini and save just the number to size.txt",
        (
            Step("read_file", {"path": "boat.ini"}, _BOAT),
            Step("write_file", {"path": "size.txt", "content": "9\n"}, "Created size.txt."),
        ),
        "size.txt says 9.",
    ),
    read("what is in roots.md?", "roots.md", "error: roots.md does not exist.", "There is no file roots.md."),
)

NEAREST: tuple[Example, ...] = (*FILES, *CHANGES, *WORK, *TALK)


def all_examples() -> Iterator[Example]:
    yield from FIXED
    yield from NEAREST
