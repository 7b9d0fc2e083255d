"""The words of requests: what they mean for the choice of a tool, in the languages that people often write in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from .small_languages import script

_ADDRESS = re.compile(r"https?://\S+")
LONGEST = 600  # characters of a request whose runs of words are looked at
_ENDLESS = re.compile(r"\S{300,}")  # no name, and slow to look through
_NAME = "0-9A-Za-z_À-ÖØ-öø-ɏ"  # where no spaces part words, a name would take its neighbours in
_FILE = re.compile(
    rf"(?:[{_NAME}.-]+/)*[{_NAME}-]*(?:\.[{_NAME}-]+)*\.[A-Za-z][A-Za-z0-9_]{{0,4}}(?![A-Za-z0-9_])"
    rf"|[{_NAME}.-]+/(?:[{_NAME}.-]+/?)*"
)
_KEY = re.compile(r"\s*[\"']?[\w.-]+[\"']?\s*[=:]\s*")
_SURE = re.compile(r"[\w-]{2,}\.[A-Za-z]\w{0,4}$|\w\.[A-Za-z]\w{1,4}$|\w/$|/.*/|^\.{1,2}/|/.*\.\w+$", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_./~-]+|[^\W\d_a-zA-Z][\w.-]*")
# Where letters of another kind begin: words of two languages that no space parts.
_LETTERS = re.compile(
    r"(?<=[A-Za-z0-9])(?=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3])|(?<=[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3])(?=[A-Za-z0-9])"
)
_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”|«[^»]+»|(?<!\w)'[^']+'(?!\w)")
_WORD = re.compile(r"[a-zà-öø-ÿß]+|\d+|[\u3040-\u30ff\u4e00-\u9fff]+|[\uac00-\ud7a3]+|§\w+")

# Words that say nothing of what is wanted.
_NOTHING = """
    a an the i me my you your it its is are be been to of in on at for and or that this these there here have has do
    does did can could will would please with from so then just we our us him her them as by up out all any some one
    into not der die das den dem ein eine einen im mir mich ist und zu von bitte el la los las un una de del en que y
    por mi es le les des du et dans
"""
# Words that mean the same here. A stroke after a word: whatever begins with it.
_MEANINGS = {
    "folder": (
        "folder- director- dir ordner verzeichnis carpeta- directorio- dossier- 폴더- 디렉- 文件夹- 目录- フォルダ-"
    ),
    "file": "file- fichier- datei- archivo- fichero- document- dokument- 파일- 文件- ファイル-",
    "show": (
        "show- display- list- ls zeig- zeige- muestra- mostrar muéstra- liste affiche- 보여- 알려- 列出- 显示- 看-"
    ),
    "read": "read- open- lies lese- öffne- lee leer abre- ouvre- lis 읽- 열- 内容- 打开- 读-",
    "here": "here hier aquí ici around 여기- 这里- 这儿- ここ-",
    "say": "say- contain- content- written steht- inhalt- dice contien- 적혀- 写-",
    "create": (
        "create- make- generat- erstell- erzeug- anleg- leg crea- crear- haz crée- créer- 만들- 생성- 创建- 新建- 作成-"
    ),
    "write": "write- save- store- put schreib- speicher- escrib- guarda- écri- 저장- 写入- 保存-",
    "add": (
        "add adds added adding append- apend- insert- attach- hänge- füge- hinzu- ergänz- añad- agreg- ajout- 추가- "
        "添加- 加上- 追加-"
    ),
    "end": "end bottom under below ende unten final fin debajo 끝- 末尾-",
    "change": (
        "change- set replac- swap- substitut- correct- fix- updat- edit- modif- turn ersetz- änder- korrigier- tausch- "
        "enabl- disabl- increas- decreas- bump- adjust- instead statt anstatt "
        "cambi- reemplaz- sustitu- corrig- remplac- 바꿔- 바꾸- 변경- 수정- 改- 替换- 修改-"
    ),
    "rename": "renam- umbenenn- benenn- renombr- renomm- 이름을- 重命名- 改名-",
    "move": "move moving verschieb- muev- mover déplac- 옮- 이동- 移动- 移到-",
    "copy": "copy copying copied duplicat- backup- kopier- copia copiar 복사- 复制- 拷贝-",
    "delete": (
        "delet- remov- erase- rid trash- lösch- entfern- borra- elimin- supprim- 삭제- 지워- 지우- 删除- 删掉- 削除-"
    ),
    "find": "find- search- locat- grep such- finde- busca- encuentr- cherch- 찾- 검색- 查找- 搜索- 找-",
    "mention": (
        "mention- appear- occur- word talk- vorkomm- erwähn- aparec- palabra- menciona- wort 단어- 提到- 出现-"
    ),
    "count": "count- many number often anzahl viele zähl- cuánt- cuant- combien 몇- 개수- 多少- 几-",
    "line": "line- row- zeile- línea- linea- fila- ligne- 줄- 행- 行-",
    "run": "run- execut- launch- start- ausführ- führe starte ejecut- corre lance- exécut- 실행- 运行- 执行- 実行-",
    "command": "command- shell bash terminal script- program- befehl- skript- comando- 명령- 스크립- 命令- 脚本-",
    "remember": (
        "remember- forget- memori- memo keep note- mind merk- vergiss recuerd- acuérd- olvid- retiens 기억- 잊지- "
        "记住- 记下- 别忘-"
    ),
    "before": (
        "chat- conversation- gespräch- conversaci- 대화- 聊天- "
        "before earlier past previous- ago again once yesterday früher damals neulich antes antier 전에- 예전- 지난- "
        "以前- 之前- 上次-"
    ),
    "told": "told said gave mentioned erzählt- gesagt dije conté raconté 말했- 말한- 说过- 告诉-",
    "remind": (
        "remind- reminder- wake alarm- schedul- erinner- weck- termin recuérd- recordar- avís- rappel- 알림- 깨워- "
        "提醒- 闹钟-"
    ),
    "when": (
        "tomorrow today tonight minute- hour- morgen heute stunde- mañana hoy hora- minuto- demain heure- 내일- "
        "오늘- 분 시간- 明天- 今天- 分钟- 小时-"
    ),
    "every": "every each daily weekly hourly jede- täglich wöchentlich cada diari- chaque 매일- 매주- 마다- 每-",
    "week": "weekday- week wochentag- woche semana 요일- 星期-",
    "web": (
        "web- online internet- google website- news weather latest netz wetter nachrichten- noticias clima météo 뉴스- "
        "날씨- 인터넷- 新闻- 天气- 网上- 上网-"
    ),
    "sort": "sort- order- alphabet- sortier- orden- 정렬- 排序-",
    "hello": "hello hi hey greetings morning hallo servus hola bonjour salut 안녕- 你好- こんにちは-",
    "thanks": "thank- thanks thx danke gracias merci 고마- 감사- 谢谢- ありがとう-",
    "bye": "bye goodbye cya tschüss adiós adios ciao 잘가- 再见-",
}

# What asks for a change, and what asks for any work at all.
CHANGES = ("create", "write", "add", "change", "rename", "move", "copy", "delete", "sort")
WORK = (*CHANGES, "folder", "file", "find", "run", "command", "remember", "remind", "web")


def _table() -> tuple[dict[str, str], list[tuple[str, str]]]:
    exact, beginnings = {}, []
    for meaning, words in _MEANINGS.items():
        for word in words.split():
            if word.endswith("-"):
                beginnings.append((word[:-1], f"§{meaning}"))
            else:
                exact[word] = f"§{meaning}"
    return exact, sorted(beginnings, key=lambda pair: -len(pair[0]))


EMPTY = frozenset(_NOTHING.split())
_EXACT, _BEGINNINGS = _table()
_MEANT = frozenset(f"§{meaning}" for meaning in _MEANINGS)


def names_an_address(text: str) -> bool:
    return _ADDRESS.search(text) is not None


def names_a_file(text: str) -> bool:
    """Whether a file or a folder is named for sure: `and/or` and `e.g.` only look like it."""
    return any(_SURE.search(path) for path in paths_in(text, whole=True))


def alike(request: str, lines: Iterable[str]) -> list[str]:
    """The lines that have most words of a request, or all where none has any."""
    said = {word for word in words(without_files(request)) if word not in EMPTY}
    shared = {line: len(said & set(words(line))) for line in lines if line.strip()}
    most = max(shared.values(), default=0)
    return [line for line, count in shared.items() if count == most]


def key_of(line: str) -> str:
    """The key of a setting with all up to its value, or nothing."""
    found = _KEY.match(line)
    return found[0] if found else ""


def kept(request: str, line: str) -> str:
    """What a line in the place of another begins with too: its key, or a first word that nobody spoke of."""
    if key := key_of(line):
        return key
    indent = line[: len(line) - len(line.lstrip())]
    first = (line.split() or [""])[0]
    return indent if set(words(first)) & set(words(request)) else indent + first


def means(text: str, *meanings: str) -> bool:
    """Whether a word of it has one of the meanings."""
    wanted = {f"§{meaning}" for meaning in meanings}
    return any(part in wanted for word in words(text) for part in _meanings(word))


def paths_in(text: str, whole: bool = False) -> list[str]:
    """The names of files and folders that stand in a text; `whole` with the stroke at a folder's end."""
    text = _ADDRESS.sub(" ", _ENDLESS.sub(" ", text))
    # An ending right behind letters of another kind is that of a name which we cannot tell from its neighbours.
    found = [one[0] for one in _FILE.finditer(text) if not (one[0][0] == "." and text[: one.start()][-1:].isalpha())]
    if whole:
        return found
    return list(dict.fromkeys(path.rstrip("/") for path in found if path.strip("./")))


def tokens(text: str) -> list[str]:
    """All that could be the name of something in a text."""
    return list(dict.fromkeys(found.strip(".,:;!?") for found in _TOKEN.findall(text) if found.strip(".,:;!?")))


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def features(text: str) -> dict[str, float]:
    """What a request is made of, each with its weight: what its words mean above all, then the words themselves and
    which stand together. Names of files and quotes are only that."""
    text = _ENDLESS.sub(" ", text)
    for pattern, name in ((_QUOTED, "§quote"), (_ADDRESS, "§address"), (_FILE, "§path")):
        text = pattern.sub(f" {name} ", text)
    said = ["§digits" if word.isdigit() else word for word in words(text)]
    meant = [part for word in said for part in _meanings(word)]
    found: dict[str, float] = {}
    for one, two in pairwise(["^", *meant, "$"]):
        found[f"{one} {two}"] = 0.5
    found[script(text)] = 1.5
    found[f"§paths{min(said.count('§path'), 2)}"] = 1.5
    for word in meant:
        if word not in EMPTY:
            found[word] = 2.0 if word in _MEANT else 1.0
    return found


def spans(text: str, within: str = "", most: int = 5) -> list[str]:
    """The runs of words of a text without the names of files: whatever a person can have named to be replaced. With
    `within`, only those that stand there."""
    found: dict[str, None] = {quoted[1:-1]: None for quoted in _QUOTED.findall(text)}
    for part in _FILE.split(_ADDRESS.sub(" ", text)) if len(text) <= LONGEST else ():
        said = _LETTERS.sub(" ", part).split()
        for start in range(len(said)):
            for end in range(start + 1, min(start + most, len(said)) + 1):
                run = " ".join(said[start:end])
                found[run] = found[run.strip(".,:;!?\"'“”«»()")] = None
    runs = [run for run in found if set(words(run)) - EMPTY]
    return [run for run in runs if re.search(rf"(?<!\w){re.escape(run)}(?!\w)", within)] if within else runs


def folders_in(text: str) -> list[str]:
    """The names that stand beside a word for a folder."""
    said = tokens(text)
    beside = [
        near
        for at, word in enumerate(said)
        if means(word, "folder")
        for near in said[max(0, at - 2) : at] + said[at + 1 : at + 3]
    ]
    return [name for name in dict.fromkeys(beside) if name.lower() not in EMPTY and not means(name, *_MEANINGS)]


def is_file(path: str) -> bool:
    """Whether a name is a file's: it has an ending, as folders have none."""
    return re.search(r"\.[A-Za-z]\w{0,4}$", path, re.ASCII) is not None


def without_files(text: str) -> str:
    """The text without the names of files."""
    return _FILE.sub(" ", _ENDLESS.sub(" ", text))


@lru_cache(maxsize=4096)
def _meanings(word: str) -> list[str]:
    """What a word means, or itself; a run of letters without spaces between words may mean several things."""
    if word.startswith("§"):
        return [word]
    if word in _EXACT:
        return [_EXACT[word]]
    if word[0] > "\u3000" and word[0] < "\uac00":
        found = [meaning for beginning, meaning in _BEGINNINGS if beginning in word]
        return found or [word]
    for beginning, meaning in _BEGINNINGS:
        if word.startswith(beginning):
            return [meaning]
    return [word]
