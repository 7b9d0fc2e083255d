"""The words of requests: what they mean for the choice of a tool, in the languages that people often write in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

_ADDRESS = re.compile(r"https?://\S+")
_FILE = re.compile(r"(?:[\w.-]+/)*[\w-]*\.[A-Za-z]\w{0,4}\b|[\w.-]+/(?:[\w.-]+/?)*", re.ASCII)
_KEY = re.compile(r"\s*[\w.-]+\s*[=:]\s*")
LATIN = "§latin"
_SURE = re.compile(r"[\w-]{2,}\.[A-Za-z]\w{0,4}$|\w\.[A-Za-z]\w{1,4}$|\w/$|/.*/|^\.{1,2}/|/.*\.\w+$", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9_./~-]+|[^\W\d_a-zA-Z][\w.-]*")
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
        "show- display- list- ls tell zeig- zeige- muestra- mostrar muéstra- liste affiche- 보여- 알려- 列出- 显示- 看-"
    ),
    "read": "read- open- lies lese- öffne- lee leer abre- ouvre- lis 읽- 열- 内容- 打开- 读-",
    "say": "say- said contain- content- written steht- inhalt- dice contien- 적혀- 写-",
    "create": (
        "create- make- generat- erstell- erzeug- anleg- leg crea- crear- haz crée- créer- 만들- 생성- 创建- 新建- 作成-"
    ),
    "write": "write- save- store- put schreib- speicher- escrib- guarda- écri- 저장- 写入- 保存-",
    "add": (
        "add- append- apend- insert- attach- hänge- füge- hinzu- ergänz- añad- agreg- ajout- 추가- 添加- 加上- 追加-"
    ),
    "end": "end bottom ende final fin 끝- 末尾-",
    "change": (
        "change- set replac- swap- substitut- correct- fix- updat- edit- modif- turn ersetz- änder- korrigier- tausch- "
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
        "before earlier past previous- ago again once told mentioned last yesterday früher erzählt damals antes "
        "dije antier hier 전에- 예전- 지난- 以前- 之前- 上次-"
    ),
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


_EMPTY = frozenset(_NOTHING.split())
_EXACT, _BEGINNINGS = _table()
_MEANT = frozenset(f"§{meaning}" for meaning in _MEANINGS)


def names_an_address(text: str) -> bool:
    return _ADDRESS.search(text) is not None


def names_a_file(text: str) -> bool:
    """Whether a file or a folder is named for sure: `and/or` and `e.g.` only look like it."""
    return any(_SURE.search(path) for path in paths_in(text, whole=True))


def alike(request: str, lines: Iterable[str]) -> list[str]:
    """The lines that have most words of a request, or all where none has any."""
    said = {word for word in words(_FILE.sub(" ", request)) if word not in _EMPTY}
    shared = {line: len(said & set(words(line))) for line in lines if line.strip()}
    most = max(shared.values(), default=0)
    return [line for line, count in shared.items() if count == most]


def kept(request: str, line: str) -> str:
    """What a line in the place of another begins with too: its key, or a first word that nobody spoke of."""
    if found := _KEY.match(line):
        return found[0]
    first = line[: len(line) - len(line.lstrip())] + (line.split() or [""])[0]
    return "" if set(words(first)) & set(words(request)) else first


def means(text: str, *meanings: str) -> bool:
    """Whether a word of it has one of the meanings."""
    wanted = {f"§{meaning}" for meaning in meanings}
    return any(part in wanted for word in words(text) for part in _meanings(word))


def paths_in(text: str, whole: bool = False) -> list[str]:
    """The names of files and folders that stand in a text; `whole` with the stroke at a folder's end."""
    text = _ADDRESS.sub(" ", text)
    if whole:
        return _FILE.findall(text)
    return list(dict.fromkeys(found.rstrip("/") for found in _FILE.findall(text) if found.strip("./")))


def tokens(text: str) -> list[str]:
    """All that could be the name of something in a text."""
    return list(dict.fromkeys(found.strip(".,:;!?") for found in _TOKEN.findall(text) if found.strip(".,:;!?")))


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def features(text: str) -> dict[str, float]:
    """What a request is made of, each with its weight: what its words mean above all, then the words themselves and
    which stand together. Names of files and quotes are only that."""
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
        if word not in _EMPTY:
            found[word] = 2.0 if word in _MEANT else 1.0
    return found


def script(text: str) -> str:
    """Which letters it is written in: examples in the same ones come first."""
    if any("\uac00" <= letter <= "\ud7a3" for letter in text):
        return "§korean"
    if any("\u3040" <= letter <= "\u30ff" for letter in text):
        return "§japanese"
    if any("\u4e00" <= letter <= "\u9fff" for letter in text):
        return "§chinese"
    return LATIN


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
