"""Worked examples for small models: what a person asks, the calls that do it with their results, and the answer.

A small model copies what it sees, so these say which tool fits, how its arguments look, and that an answer is short
and says only what a result said. `FIXED` stand in every prompt; of `NEAREST` those that look like the
request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .small_results import quote


@dataclass(frozen=True, slots=True)
class Step:
    """A call and what it gave."""

    tool: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class Example:
    request: str
    steps: tuple[Step, ...]
    answer: str

    @property
    def tools(self) -> frozenset[str]:
        return frozenset(step.tool for step in self.steps)


def _talk(request: str, answer: str) -> Example:
    return Example(request, (), answer)


def _one(request: str, tool: str, result: str, answer: str, **arguments: Any) -> Example:
    return Example(request, (Step(tool, arguments, result),), answer)


def _list(request: str, result: str, answer: str = "", path: str = ".") -> Example:
    """The answer to a list is the list, and then perhaps a sentence."""
    listed = quote("list_dir", {}, result)
    return _one(request, "list_dir", result, f"{listed}\n{answer}".strip(), path=path)


def _show(request: str, path: str, result: str) -> Example:
    return _one(request, "read_file", result, quote("read_file", {"path": path}, result), path=path)


def _read(request: str, path: str, result: str, answer: str) -> Example:
    return _one(request, "read_file", result, answer, path=path)


def _write(request: str, path: str, content: str, answer: str) -> Example:
    return _one(request, "write_file", f"Created {path}.", answer, path=path, content=content)


def _edit(request: str, path: str, old: str, new: str, answer: str) -> Example:
    return _one(request, "edit_file", f"Edited {path} in line 2.", answer, path=path, old_text=old, new_text=new)


def _run(request: str, command: str, result: str, answer: str) -> Example:
    return _one(request, "exec", result or "(no output)", answer, command=command)


def _plan(request: str, answer: str, **arguments: Any) -> Example:
    return _one(request, "cron", "Added job 7c2e.", answer, action="add", **arguments)


def _note(request: str, text: str, answer: str) -> Example:
    return _one(request, "remember", "Remembered.", answer, text=text)


_BOAT = "name = Heron\nlength = 9\nhull = steel"

FIXED: tuple[Example, ...] = (
    _talk("hello!", "Hello! What can I do for you?"),
    _list(
        "what's in this folder?",
        "plants/\nseeds/\nferns.md  120 B\nsoil.txt  61 B\nwater.csv  88 B\nweather.log  2 kB",
        "",
    ),
    _read(
        "what does ferns.md say about light?",
        "ferns.md",
        "# Ferns\nlight: shade only\nwater: daily",
        "Ferns want shade only.",
    ),
    _write("make a file pond.txt with the text two frogs", "pond.txt", "two frogs\n", "I created pond.txt."),
    _run(
        "add the line moss to garden/list.txt", "echo 'moss' >> garden/list.txt", "", "I added moss to garden/list.txt."
    ),
    _edit("in ferns.md change daily to weekly", "ferns.md", "daily", "weekly", "ferns.md says weekly now."),
    Example(
        "set the hull to oak in boat.ini",
        (
            Step("read_file", {"path": "boat.ini"}, _BOAT),
            Step(
                "edit_file",
                {"path": "boat.ini", "old_text": "hull = steel", "new_text": "hull = oak"},
                "Edited boat.ini in line 3.",
            ),
        ),
        "The hull is oak now.",
    ),
    _run("rename pond.txt to lake.txt", "mv pond.txt lake.txt", "", "It is called lake.txt now."),
    _one(
        "where is the word beetle used?",
        "grep",
        "plants/pests.md:3:the beetle eats leaves",
        "In plants/pests.md, line 3.",
        pattern="beetle",
    ),
    _run("how many lines has water.csv?", "wc -l < water.csv", "14", "water.csv has 14 lines."),
    _talk("what is the capital of Norway?", "The capital of Norway is Oslo."),
    Example(
        "find the length in boat.ini and save just the number to size.txt",
        (
            Step("read_file", {"path": "boat.ini"}, _BOAT),
            Step("write_file", {"path": "size.txt", "content": "9\n"}, "Created size.txt."),
        ),
        "size.txt says 9.",
    ),
    _read("what is in roots.md?", "roots.md", "error: roots.md does not exist.", "There is no file roots.md."),
)

NEAREST: tuple[Example, ...] = (
    # what there is
    _list(
        "list the files",
        "wood/\noak.txt  5 B\nelm.txt  9 B\nfir.md  2 B",
        "",
    ),
    _list(
        "ls",
        "oak.txt  5 B\nelm.txt  9 B\nfir.md  2 B\nyew.md  3 B",
        "",
    ),
    _list(
        "show me everything in the trees directory",
        "elm.txt  9 B\nash.txt  7 B",
        "",
        "trees",
    ),
    _list(
        "what files do I have in music/?",
        "waltz.mp3  5 kB\nsong.mp3  9 kB",
        "",
        "music",
    ),
    _list("is there a picture in this folder?", "cat.png  5 kB\nelm.txt  9 B", "Yes: cat.png."),
    _list(
        "how many files are there in the trees folder?",
        "elm.txt  9 B\nash.txt  7 B\noak.txt  5 B",
        "There are 3 files in trees.",
        "trees",
    ),
    _list(
        "is there anything in the boxes folder?", "error: boxes does not exist.", "There is no folder boxes.", "boxes"
    ),
    _list("ls boxes/", "pin.txt  5 B\ncap.txt  9 B", "", "boxes"),
    _list("what's inside the boxes folder?", "pin.txt  5 B\ncap.txt  9 B", "", "boxes"),
    _list(
        "what do we have here?",
        "trees/\nelm.txt  9 B\nash.txt  7 B",
        "",
    ),
    _list(
        "which songs are in the directory music?",
        "waltz.mp3  5 kB\nsong.mp3  9 kB",
        "",
        "music",
    ),
    _list("do I have a spreadsheet here?", "cash.xlsx  5 kB\nelm.txt  9 B", "Yes: cash.xlsx."),
    _list("anything new in the inbox dir?", "error: inbox does not exist.", "There is no folder inbox.", "inbox"),
    _list("Welche Dateien liegen hier?", "eiche.txt  5 B\nulme.txt  9 B", ""),
    _list("Was ist im Ordner wald?", "eiche.txt  5 B", "", "wald"),
    _list("¿Qué hay en esta carpeta?", "roble.txt  5 B\nolmo.txt  9 B", ""),
    _list("muéstrame los archivos de la carpeta bosque", "roble.txt  5 B", "", "bosque"),
    _list("Quels fichiers y a-t-il ici ?", "chene.txt  5 B", ""),
    _list("이 폴더에 어떤 파일이 있어?", "oak.txt  5 B\nelm.txt  9 B", ""),
    _list("trees 폴더 안에 뭐가 있지?", "elm.txt  9 B", "", "trees"),
    _list("这里有什么文件?", "oak.txt  5 B\nelm.txt  9 B", ""),
    _list("列出 trees 目录的内容", "elm.txt  9 B", "", "trees"),
    _list("ここにはどんなファイルがありますか?", "oak.txt  5 B", ""),
    # what a file says
    _show("show me rivers.txt", "rivers.txt", "Rhine\nDanube\nElbe"),
    _show("what's written in maps/north.md?", "maps/north.md", "# North\nHere is snow."),
    _show("read rivers.txt please", "rivers.txt", "Rhine\nDanube\nElbe"),
    _show("open notes/bees.md", "notes/bees.md", "# Bees\nbuy honey\nask Ida about wax"),
    _show("let me see the content of jobs.txt", "jobs.txt", "paint the fence\nsell the car\nwater the trees"),
    _show("print pump.py", "pump.py", "for n in range(3):\n    print('pump')"),
    _read("Which port is set in net.ini?", "net.ini", "[net]\nport = 4400", "The port is 4400."),
    _read(
        "who is the author according to book/cover.txt?",
        "book/cover.txt",
        "title: Sand\nauthor: Ines Falk",
        "The author is Ines Falk.",
    ),
    _read(
        "look at ship.md: how old is it and where was it built?",
        "ship.md",
        "built in Kiel\nage: 31 years",
        "It is 31 years old and was built in Kiel.",
    ),
    _read("how much did the saw cost? see tools.csv", "tools.csv", "tool,price\nhammer,12\nsaw,19", "The saw cost 19."),
    _read("check maps/east.md: who drew it?", "maps/east.md", "drawn by Rosa Bell", "Rosa Bell drew it."),
    _read(
        "according to notes/bees.md, how many bees live in a hive?",
        "notes/bees.md",
        "A hive has 40000 bees.",
        "40000 bees live in a hive.",
    ),
    _read("what is the first line of rivers.txt?", "rivers.txt", "Rhine\nDanube\nElbe", "The first line is: Rhine"),
    _read("what's the last entry in rivers.txt", "rivers.txt", "Rhine\nDanube\nElbe", "The last one is Elbe."),
    _read("what does pump.py do?", "pump.py", "for n in range(3):\n    print('pump')", "It prints pump three times."),
    _read(
        "summarise maps/north.md in one sentence",
        "maps/north.md",
        "# North\nIt snows all year. Few people live there.",
        "In the north it snows all year and few people live there.",
    ),
    _read(
        "which one in tools.csv is the cheapest?", "tools.csv", "tool,price\nhammer,12\nsaw,19", "The hammer, at 12."
    ),
    _read(
        "tell me what ghost.txt contains",
        "ghost.txt",
        "error: ghost.txt does not exist.",
        "There is no file ghost.txt.",
    ),
    _read(
        "open ghost.pdf and explain it",
        "ghost.pdf",
        "error: ghost.pdf does not exist.",
        "I cannot: there is no file ghost.pdf.",
    ),
    _show("Was steht in der Datei fluss.txt?", "fluss.txt", "Rhein\nDonau"),
    _read("Wie hoch ist die Miete laut haus.md?", "haus.md", "Miete: 610 Euro", "Die Miete beträgt 610 Euro."),
    _show("¿Qué dice rios.txt?", "rios.txt", "Ebro\nTajo"),
    _read("¿Cuánto cuesta la sierra según precios.csv?", "precios.csv", "sierra,19", "La sierra cuesta 19."),
    _show("rivers.txt 내용 보여줘", "rivers.txt", "Rhine\nElbe"),
    _read("ship.md를 읽고 어디서 만들었는지 알려줘", "ship.md", "built in Kiel", "Kiel에서 만들었습니다."),
    _show("rivers.txt 里写了什么?", "rivers.txt", "Rhine\nElbe"),
    _read("看一下 net.ini,端口是多少?", "net.ini", "port = 4400", "端口是 4400。"),
    _show("Que dit le fichier fleuves.txt ?", "fleuves.txt", "Loire\nSeine"),
    # new files
    _write("create a new file song.txt that says: la la la", "song.txt", "la la la\n", "I created song.txt."),
    _write(
        "write a python script bell.py that prints ding dong", "bell.py", "print('ding dong')\n", "I wrote bell.py."
    ),
    _write("save the phone number 555 0188 in phone.txt", "phone.txt", "555 0188\n", "The number is in phone.txt."),
    _write(
        "I want a file maps/south.md with the heading South and the text Here is sand.",
        "maps/south.md",
        "# South\n\nHere is sand.\n",
        "I wrote maps/south.md.",
    ),
    _write(
        "write the colours red, blue and pink to colours.txt, each on its own line",
        "colours.txt",
        "red\nblue\npink\n",
        "I wrote colours.txt.",
    ),
    _write(
        "make a csv file birds.csv with the columns bird and eggs and the row wren 5",
        "birds.csv",
        "bird,eggs\nwren,5\n",
        "I wrote birds.csv.",
    ),
    _write("make a json file lamp.json where watts is 40", "lamp.json", '{"watts": 40}\n', "I wrote lamp.json."),
    _run("make an empty file called void.md", "touch void.md", "", "void.md is there and empty."),
    _write(
        "new file todo/week.md: a list with bread and milk",
        "todo/week.md",
        "- bread\n- milk\n",
        "I wrote todo/week.md.",
    ),
    _write("write a shell script hi.sh that prints hey", "hi.sh", "echo hey\n", "I wrote hi.sh."),
    _write(
        "put a short poem about rain into rain.txt",
        "rain.txt",
        "Soft rain falls,\nthe garden calls.\n",
        "I wrote a poem to rain.txt.",
    ),
    _write(
        "Erstelle eine Datei gruss.md mit dem Inhalt Servus zusammen",
        "gruss.md",
        "Servus zusammen\n",
        "Ich habe gruss.md erstellt.",
    ),
    _write("Crea un archivo lista.md que diga pan y leche", "lista.md", "pan y leche\n", "He creado lista.md."),
    _write("song.txt 파일을 만들고 라라라 라고 적어줘", "song.txt", "라라라\n", "song.txt를 만들었습니다."),
    _write("新建文件 song.txt,内容是 啦啦啦", "song.txt", "啦啦啦\n", "已创建 song.txt。"),
    _write("Crée un fichier note.txt avec le texte bonjour Paul", "note.txt", "bonjour Paul\n", "J'ai créé note.txt."),
    _write("put the words blue sky into a new file sky.txt", "sky.txt", "blue sky\n", "The words are in sky.txt."),
    _write("I need a file beds.txt that says: three beds", "beds.txt", "three beds\n", "I wrote beds.txt."),
    _write(
        "can you make me a little python program gong.py printing Gong!",
        "gong.py",
        "print('Gong!')\n",
        "I wrote gong.py.",
    ),
    _write(
        "make a folder cups with a file one.md in it, text: red cup",
        "cups/one.md",
        "red cup\n",
        "cups/one.md is there.",
    ),
    _write("save my size (41 wide) to a file size2.txt", "size2.txt", "41 wide\n", "It is in size2.txt."),
    _write(
        "make eggs.csv: header day,eggs and the row Monday,6", "eggs.csv", "day,eggs\nMonday,6\n", "I wrote eggs.csv."
    ),
    _write("create a file pets.txt containing a grey cat", "pets.txt", "a grey cat\n", "I created pets.txt."),
    _write("note down the numbers 3, 5 and 8 in nums.txt, one per line", "nums.txt", "3\n5\n8\n", "I wrote nums.txt."),
    # at the end of a file
    _run('append "call Rita" to tasks.md', "echo 'call Rita' >> tasks.md", "", "I added it to tasks.md."),
    _run("put Volga at the end of rivers.txt", "echo 'Volga' >> rivers.txt", "", "Volga is in rivers.txt now."),
    _run(
        "we need nails too, add them to shop/list.txt",
        "echo 'nails' >> shop/list.txt",
        "",
        "I added nails to shop/list.txt.",
    ),
    _run("add a row wren,5 to birds.csv", "echo 'wren,5' >> birds.csv", "", "The row is in birds.csv."),
    _run("add a bullet '- soap' to tasks.md", "echo '- soap' >> tasks.md", "", "I added it to tasks.md."),
    _run("add the line it's raining to sky.txt", 'echo "it\'s raining" >> sky.txt', "", "I added it to sky.txt."),
    _run("Hänge die Zeile Weser an fluss.txt an", "echo 'Weser' >> fluss.txt", "", "Weser steht jetzt in fluss.txt."),
    _run("Añade la línea Duero a rios.txt", "echo 'Duero' >> rios.txt", "", "He añadido Duero a rios.txt."),
    _run("rivers.txt 끝에 Volga를 추가해줘", "echo 'Volga' >> rivers.txt", "", "Volga를 추가했습니다."),
    _run("在 rivers.txt 末尾加上 Volga", "echo 'Volga' >> rivers.txt", "", "已经加上 Volga。"),
    # other words in a file
    _edit("replace Elbe with Oder in rivers.txt", "rivers.txt", "Elbe", "Oder", "rivers.txt says Oder now."),
    _edit("the port in net.ini must be 5500 instead of 4400", "net.ini", "4400", "5500", "The port is 5500 now."),
    _edit(
        "fix the typo 'recieve' in mail.txt, it should be 'receive'",
        "mail.txt",
        "recieve",
        "receive",
        "I fixed it in mail.txt.",
    ),
    _edit("Ken's flat went from 610 to 650. update house.md", "house.md", "610", "650", "house.md says 650 now."),
    _one(
        "change every cat to dog in pets.txt",
        "edit_file",
        "Edited pets.txt in lines 1 and 3.",
        "Every cat is a dog now.",
        path="pets.txt",
        old_text="cat",
        new_text="dog",
        replace_all=True,
    ),
    _edit(
        "Ida lives in house 14 now, not 12. please correct street.txt",
        "street.txt",
        "12",
        "14",
        "street.txt says 14 now.",
    ),
    _edit("write Vienna instead of Graz in trip.md", "trip.md", "Graz", "Vienna", "trip.md says Vienna now."),
    _edit("rename the variable count to total in pump.py", "pump.py", "count", "total", "It is called total now."),
    Example(
        "turn debug off in app.toml",
        (
            Step("read_file", {"path": "app.toml"}, "title = 'x'\ndebug = true"),
            Step(
                "edit_file",
                {"path": "app.toml", "old_text": "debug = true", "new_text": "debug = false"},
                "Edited app.toml in line 2.",
            ),
        ),
        "debug is off in app.toml.",
    ),
    Example(
        "change the volume in radio.conf to 7",
        (
            Step("read_file", {"path": "radio.conf"}, "band = FM\nvolume = 3"),
            Step(
                "edit_file",
                {"path": "radio.conf", "old_text": "volume = 3", "new_text": "volume = 7"},
                "Edited radio.conf in line 2.",
            ),
        ),
        "The volume is 7 now.",
    ),
    Example(
        "make the timeout 90 in net.ini",
        (
            Step("read_file", {"path": "net.ini"}, "host = a1\ntimeout = 30"),
            Step(
                "edit_file",
                {"path": "net.ini", "old_text": "timeout = 30", "new_text": "timeout = 90"},
                "Edited net.ini in line 2.",
            ),
        ),
        "The timeout is 90 now.",
    ),
    _run("remove the line Elbe from rivers.txt", "sed -i '/^Elbe$/d' rivers.txt", "", "Elbe is gone from rivers.txt."),
    _edit("Ersetze in fluss.txt Donau durch Main", "fluss.txt", "Donau", "Main", "In fluss.txt steht jetzt Main."),
    _edit("Cambia Tajo por Miño en rios.txt", "rios.txt", "Tajo", "Miño", "Ahora dice Miño."),
    _edit("rivers.txt에서 Elbe를 Oder로 바꿔줘", "rivers.txt", "Elbe", "Oder", "Oder로 바꿨습니다."),
    _edit("把 rivers.txt 里的 Elbe 改成 Oder", "rivers.txt", "Elbe", "Oder", "已改成 Oder。"),
    # files as wholes
    _run("move lake.txt into the maps folder", "mv lake.txt maps/", "", "lake.txt is in maps now."),
    _run("copy net.ini to net.old", "cp net.ini net.old", "", "I copied net.ini to net.old."),
    _run("delete lake.txt", "rm lake.txt", "", "lake.txt is deleted."),
    _run("erase maps/west.md, it is not needed", "rm maps/west.md", "", "maps/west.md is gone."),
    _run(
        "remove gone.log",
        "rm gone.log",
        "rm: cannot remove 'gone.log': No such file or directory\n[exit status 1]",
        "I could not: there is no file gone.log.",
    ),
    _run("make a folder called photos2", "mkdir -p photos2", "", "The folder photos2 is there."),
    _run("give bell.py the new name gong.py", "mv bell.py gong.py", "", "It is called gong.py now."),
    _run("delete the empty folder old", "rmdir old", "", "The folder old is gone."),
    _run(
        "put rivers.txt and lake.txt together into water.txt",
        "cat rivers.txt lake.txt > water.txt",
        "",
        "water.txt has both.",
    ),
    _run("Benenne see.txt in teich.txt um", "mv see.txt teich.txt", "", "Die Datei heißt jetzt teich.txt."),
    _run("Lösche die Datei see.txt", "rm see.txt", "", "see.txt ist gelöscht."),
    _run("Crea una carpeta llamada mapas", "mkdir -p mapas", "", "La carpeta mapas está lista."),
    _run("Borra lago.txt", "rm lago.txt", "", "lago.txt está borrado."),
    _run("lake.txt를 삭제해줘", "rm lake.txt", "", "lake.txt를 삭제했습니다."),
    _run("maps 라는 폴더를 만들어줘", "mkdir -p maps", "", "maps 폴더를 만들었습니다."),
    _run("把 lake.txt 重命名为 sea.txt", "mv lake.txt sea.txt", "", "现在叫 sea.txt。"),
    _run("删除 lake.txt", "rm lake.txt", "", "已删除 lake.txt。"),
    # where something stands
    _one(
        "look for the word anchor in all my notes",
        "grep",
        "ship.md:4:the anchor is rusty",
        "In ship.md, line 4: the anchor is rusty.",
        pattern="anchor",
    ),
    _one(
        "which file talks about snow?",
        "grep",
        "maps/north.md:2:Here is snow.",
        "maps/north.md talks about snow.",
        pattern="snow",
    ),
    _one(
        "where is the function pump defined?",
        "grep",
        "water/pump.py:7:def pump(n):",
        "In water/pump.py, line 7.",
        pattern="def pump",
    ),
    _one(
        "show all lines with ERROR in boot.log",
        "grep",
        "boot.log:2:ERROR no disk\nboot.log:9:ERROR no net",
        "Two lines: ERROR no disk, and ERROR no net.",
        pattern="ERROR",
        path="boot.log",
    ),
    _one(
        "is there anything about a lion in zoo.txt?",
        "grep",
        "(no line matches)",
        "No, zoo.txt does not mention a lion.",
        pattern="lion",
        path="zoo.txt",
    ),
    _one(
        "does ship.md mention Kiel?",
        "grep",
        "ship.md:1:built in Kiel",
        "Yes: built in Kiel.",
        pattern="Kiel",
        path="ship.md",
    ),
    _one("find all python files", "find_files", "bell.py\nwater/pump.py", "bell.py and water/pump.py.", pattern="*.py"),
    _one("where is the file north.md?", "find_files", "maps/north.md", "It is maps/north.md.", pattern="north.md"),
    _one("are there any images anywhere, like .png?", "find_files", "a/cat.png", "Yes: a/cat.png.", pattern="*.png"),
    _one(
        "find files whose name starts with map",
        "find_files",
        "maps/map1.md\nmap2.md",
        "maps/map1.md and map2.md.",
        pattern="map*",
    ),
    _one("In welcher Datei steht das Wort Schnee?", "grep", "nord.md:2:Schnee", "In nord.md.", pattern="Schnee"),
    _one("¿en qué archivo aparece la palabra nieve?", "grep", "norte.md:2:nieve", "En norte.md.", pattern="nieve"),
    _one("Anchor라는 단어가 어느 파일에 있어?", "grep", "ship.md:4:Anchor", "ship.md에 있습니다.", pattern="Anchor"),
    _one("哪个文件提到了 snow?", "grep", "maps/north.md:2:snow", "maps/north.md。", pattern="snow"),
    # how many
    _run("how many words does ship.md have?", "wc -w < ship.md", "212", "ship.md has 212 words."),
    _run("count the rivers in rivers.txt, one is on each line", "wc -l < rivers.txt", "3", "There are 3 rivers."),
    _run("how often does fog occur in weather.txt?", "grep -c 'fog' weather.txt", "6", "fog occurs 6 times."),
    _run("how many python files are there?", "find . -name '*.py' | wc -l", "2", "There are 2 python files."),
    _run("how big is tape.wav?", "wc -c < tape.wav", "40960", "tape.wav has 40960 bytes."),
    _run("Wie viele Zeilen hat fluss.txt?", "wc -l < fluss.txt", "2", "fluss.txt hat 2 Zeilen."),
    _run("¿Cuántas líneas tiene rios.txt?", "wc -l < rios.txt", "2", "rios.txt tiene 2 líneas."),
    _run("rivers.txt는 몇 줄이야?", "wc -l < rivers.txt", "3", "3줄입니다."),
    _run("rivers.txt 有多少行?", "wc -l < rivers.txt", "3", "有 3 行。"),
    # commands
    _run("run echo good night", "echo good night", "good night", "It printed: good night"),
    _run("execute bell.py and tell me the output", "python3 bell.py", "ding dong", "The output is: ding dong"),
    _run("run the script hi.sh", "sh hi.sh", "hey", "It printed: hey"),
    _run("start hello.py, what does it print?", "python3 hello.py", "ahoy", "It prints: ahoy"),
    _run("run stats.sh and tell me the result", "sh stats.sh", "total 31", "The result is: total 31"),
    _run("what time is it?", "date '+%H:%M'", "14:26", "It is 14:26."),
    _run("use a command to print the current year", "date +%Y", "2031", "It is 2031."),
    _run("which day of the week was 1999-03-02? use date", "date -d 1999-03-02 +%A", "Tuesday", "It was a Tuesday."),
    _run(
        "what date is 30 days after 2031-01-05? use the shell",
        "date -d '2031-01-05 +30 days' +%F",
        "2031-02-04",
        "It is 2031-02-04.",
    ),
    _run("sort rivers.txt into sorted.txt", "sort rivers.txt > sorted.txt", "", "sorted.txt has the sorted lines."),
    _run(
        "save the lines of rivers.txt in reverse to back.txt",
        "tac rivers.txt > back.txt",
        "",
        "back.txt has them in reverse.",
    ),
    _run(
        "keep only the unique lines of pets.txt in once.txt",
        "sort -u pets.txt > once.txt",
        "",
        "once.txt has each line once.",
    ),
    _run(
        "write the first 2 lines of rivers.txt to top.txt",
        "head -n 2 rivers.txt > top.txt",
        "",
        "top.txt has the first 2 lines.",
    ),
    _run(
        "convert rivers.txt to upper case and save it as big.txt",
        "tr a-z A-Z < rivers.txt > big.txt",
        "",
        "big.txt is in upper case.",
    ),
    _run("add up the numbers 1 to 40 in the shell", "seq 40 | awk '{s+=$1} END {print s}'", "820", "The sum is 820."),
    _run("calculate 17*23 with python", "python3 -c 'print(17*23)'", "391", "It is 391."),
    _run("run ls -l | wc -l and tell me what it prints", "ls -l | wc -l", "8", "It prints 8."),
    _run(
        "print the last 3 lines of boot.log with tail", "tail -n 3 boot.log", "a\nb\nc", "The last lines are: a, b, c."
    ),
    _run("Führe den Befehl uname aus", "uname", "Linux", "Die Ausgabe ist: Linux"),
    _run("ejecuta el comando uname", "uname", "Linux", "La salida es: Linux"),
    _run("uname 명령을 실행해줘", "uname", "Linux", "결과는 Linux입니다."),
    _run("运行命令 uname", "uname", "Linux", "输出是 Linux。"),
    # what should be known later
    _note("remember that my sister is called Nora", "The user's sister is called Nora.", "I will remember that."),
    _note("keep in mind: the wifi code is blue77", "The wifi code is blue77.", "I noted it."),
    _note("don't forget that I park on level 3", "The user parks on level 3.", "I will not forget it."),
    _note("note for the future: I prefer short answers", "The user prefers short answers.", "Noted."),
    _note("Merk dir, dass mein Hund Balu heißt", "Der Hund des Nutzers heißt Balu.", "Das merke ich mir."),
    _note("Recuerda que vivo en Murcia", "El usuario vive en Murcia.", "Lo recordaré."),
    _note("내 고양이 이름은 나비야. 기억해 줘", "사용자의 고양이 이름은 나비이다.", "기억하겠습니다."),
    _note("记住我的生日是五月三日", "用户的生日是五月三日。", "我记住了。"),
    # what was said before
    _one(
        "what did I tell you about my boat last time?",
        "memory_search",
        "user: my boat is called Heron",
        "You said that your boat is called Heron.",
        query="boat",
    ),
    _one(
        "do you remember which tea I like? I mentioned it before",
        "memory_search",
        "user: I like mint tea",
        "You like mint tea.",
        query="tea",
    ),
    _one(
        "search our past conversations: when does Nora arrive?",
        "memory_search",
        "user: Nora arrives on 2 May",
        "Nora arrives on 2 May.",
        query="Nora arrive",
    ),
    _one(
        "what was the wifi code again? I gave it to you",
        "memory_search",
        "user: the wifi code is blue77",
        "The wifi code is blue77.",
        query="wifi code",
    ),
    _one(
        "Weißt du noch, wie mein Hund heißt? Ich habe es dir erzählt.",
        "memory_search",
        "user: mein Hund heißt Balu",
        "Dein Hund heißt Balu.",
        query="Hund heißt",
    ),
    _one(
        "¿te acuerdas de dónde vivo? te lo dije antes",
        "memory_search",
        "user: vivo en Murcia",
        "Vives en Murcia.",
        query="vivo",
    ),
    _one(
        "전에 말한 내 고양이 이름이 뭐였지?",
        "memory_search",
        "user: 고양이 이름은 나비",
        "나비입니다.",
        query="고양이 이름",
    ),
    _one("我以前说过我的生日是哪天?", "memory_search", "user: 我的生日是五月三日", "是五月三日。", query="生日"),
    # what should happen at a time
    _plan(
        "remind me in 20 minutes to turn off the oven",
        "I will remind you in 20 minutes.",
        message="Remind the user to turn off the oven.",
        at="in 20 minutes",
    ),
    _plan(
        "wake me tomorrow at 6:45", "I will wake you tomorrow at 6:45.", message="Wake the user.", at="tomorrow 6:45"
    ),
    _plan(
        "reminder at 17:00 today: call the bank",
        "I will remind you at 17:00.",
        message="Remind the user to call the bank.",
        at="today 17:00",
    ),
    _plan(
        "on 2031-06-01 at 10:00 remind me of the exam",
        "I will remind you then.",
        message="Remind the user of the exam.",
        at="2031-06-01T10:00",
    ),
    _plan(
        "tell me to blink every 15 minutes", "I will, every 15 minutes.", message="Tell the user to blink.", every="15m"
    ),
    _plan(
        "every 2 hours ask me how I feel",
        "I will ask every 2 hours.",
        message="Ask the user how they feel.",
        every="2h",
    ),
    _plan(
        "every morning at 8:30 remind me to water the ferns",
        "I will remind you every day at 8:30.",
        message="Remind the user to water the ferns.",
        cron="30 8 * * *",
    ),
    _plan(
        "each day at 21:05 tell me to lock the door",
        "I will, every day at 21:05.",
        message="Tell the user to lock the door.",
        cron="5 21 * * *",
    ),
    _plan(
        "every friday at 16:00 remind me of the time sheet",
        "I will remind you every Friday at 16:00.",
        message="Remind the user of the time sheet.",
        cron="0 16 * * 5",
    ),
    _plan(
        "on weekdays at 9 remind me of the meeting",
        "I will remind you on weekdays at 9.",
        message="Remind the user of the meeting.",
        cron="0 9 * * 1-5",
    ),
    _one(
        "which reminders are set?",
        "cron",
        "7c2e: once, Sunday 17:00; to cli:direct: Remind the user to call the bank.",
        "One: to call the bank on Sunday at 17:00.",
        action="list",
    ),
    _one("show my scheduled jobs", "cron", "(nothing is scheduled)", "Nothing is scheduled.", action="list"),
    _one("cancel the reminder 7c2e", "cron", "Removed job 7c2e.", "I cancelled it.", action="remove", id="7c2e"),
    _plan(
        "Erinnere mich in 10 Minuten an den Tee",
        "Ich erinnere dich in 10 Minuten.",
        message="Den Nutzer an den Tee erinnern.",
        at="in 10 minutes",
    ),
    _plan(
        "Erinnere mich jeden Tag um 8:30 an die Tablette",
        "Ich erinnere dich jeden Tag um 8:30.",
        message="Den Nutzer an die Tablette erinnern.",
        cron="30 8 * * *",
    ),
    _plan(
        "Recuérdame en 2 horas llamar a Rita",
        "Te lo recordaré en 2 horas.",
        message="Recordar al usuario que llame a Rita.",
        at="in 2 hours",
    ),
    _plan(
        "30분 뒤에 빨래하라고 알려줘",
        "30분 뒤에 알려드리겠습니다.",
        message="사용자에게 빨래하라고 알려 준다.",
        at="in 30 minutes",
    ),
    _plan("15 分钟后提醒我喝水", "15 分钟后提醒你。", message="提醒用户喝水。", at="in 15 minutes"),
    # the web
    _one(
        "search the web for the height of Ben Nevis",
        "web_search",
        "Ben Nevis: 1345 m (example.org/nevis)",
        "Ben Nevis is 1345 m high.",
        query="height of Ben Nevis",
    ),
    _one(
        "look up online who won the race yesterday",
        "web_search",
        "Kim won the race (example.org/race)",
        "Kim won the race.",
        query="who won the race yesterday",
    ),
    _one(
        "what does https://example.org/tea say?",
        "web_fetch",
        "# Tea\nTea needs hot water.",
        "It says that tea needs hot water.",
        url="https://example.org/tea",
    ),
    # more than one step
    Example(
        "write plus.py that prints 40+2, then run it",
        (
            Step("write_file", {"path": "plus.py", "content": "print(40 + 2)\n"}, "Created plus.py."),
            Step("exec", {"command": "python3 plus.py"}, "42"),
        ),
        "plus.py printed 42.",
    ),
    Example(
        "find out where the speed is set and change it to 80",
        (
            Step("grep", {"pattern": "speed"}, "car/motor.ini:3:speed = 60"),
            Step(
                "edit_file",
                {"path": "car/motor.ini", "old_text": "speed = 60", "new_text": "speed = 80"},
                "Edited car/motor.ini in line 3.",
            ),
        ),
        "The speed in car/motor.ini is 80 now.",
    ),
    Example(
        "take the second river from rivers.txt and write it to pick.txt",
        (
            Step("read_file", {"path": "rivers.txt"}, "Rhine\nDanube\nElbe"),
            Step("write_file", {"path": "pick.txt", "content": "Danube\n"}, "Created pick.txt."),
        ),
        "pick.txt says Danube.",
    ),
    Example(
        "make a folder notes2 and move lake.txt into it",
        (Step("exec", {"command": "mkdir -p notes2 && mv lake.txt notes2/"}, "(no output)"),),
        "lake.txt is in notes2 now.",
    ),
    # nothing but words
    _talk("hi, how are you?", "I am fine, thank you. What can I do for you?"),
    _talk("thanks, that was helpful", "You are welcome!"),
    _talk("good night, see you", "Good night, see you!"),
    _talk("what can you do?", "I can read, write and search files, run commands, remember things and set reminders."),
    _talk("who painted the Mona Lisa?", "The Mona Lisa was painted by Leonardo da Vinci."),
    _talk("what is 6 times 7?", "6 times 7 is 42."),
    _talk("how many days are in two weeks?", "A week has 7 days, so two weeks have 2 * 7 = 14 days."),
    _talk("how many legs does a spider have?", "A spider has eight legs."),
    _talk("what does 'merci' mean?", "'merci' is French and means 'thank you'."),
    _talk("how do you say cat in Spanish?", "Cat is 'gato' in Spanish."),
    _talk("what's the opposite of cold?", "The opposite of cold is hot."),
    _talk("tell me a joke", "Why did the bicycle fall over? It was two tired."),
    _talk("what is the largest ocean?", "The largest ocean is the Pacific Ocean."),
    _talk("how many seconds are in 5 minutes?", "A minute has 60 seconds, so 5 minutes have 5 * 60 = 300 seconds."),
    _talk("what's 90 minus 35?", "90 minus 35 is 55."),
    _talk("which animal says meow?", "The cat says meow."),
    _talk(
        "why is the sky dark at night?",
        "At night the sun is on the other side of the earth, so its light does not reach us.",
    ),
    _talk("what do you get when ice melts?", "When ice melts you get water."),
    _talk("who invented the telephone?", "Alexander Graham Bell is known as the inventor of the telephone."),
    _talk("when did the second world war end?", "The Second World War ended in 1945."),
    _talk("i have to go now, see you later", "See you later!"),
    _talk("that's it for now", "All right. See you!"),
    _talk("great job", "Thank you!"),
    _talk("what is your name?", "I am Everloop, your assistant."),
    _talk("how are you doing today?", "I am doing well, thank you. What can I do for you?"),
    _talk("translate 'good evening' into German", "It is 'Guten Abend'."),
    _talk("give me a word that rhymes with house", "Mouse rhymes with house."),
    _talk("is a tomato a fruit?", "Yes, a tomato is a fruit."),
    _talk("Wie viel ist 12 plus 30?", "12 plus 30 ist 42."),
    _talk("¿Cuál es la capital de Noruega?", "La capital de Noruega es Oslo."),
    _talk("¿cuánto es 12 más 30?", "12 más 30 son 42."),
    _talk("Hallo! Wie geht es dir?", "Hallo! Mir geht es gut. Was kann ich für dich tun?"),
    _talk("Was ist die Hauptstadt von Norwegen?", "Die Hauptstadt von Norwegen ist Oslo."),
    _talk("hola, ¿qué tal?", "¡Hola! ¿En qué puedo ayudarte?"),
    _talk("gracias", "¡De nada!"),
    _talk("안녕?", "안녕하세요! 무엇을 도와드릴까요?"),
    _talk("고마워", "천만에요!"),
    _talk("노르웨이의 수도는 어디야?", "노르웨이의 수도는 오슬로입니다."),
    _talk("你好", "你好!有什么可以帮你?"),
    _talk("谢谢", "不客气!"),
    _talk("挪威的首都是哪里?", "挪威的首都是奥斯陆。"),
)


def all_examples() -> Iterator[Example]:
    yield from FIXED
    yield from NEAREST
