"""What words mean for the choice of a tool, in the languages that people often write in."""

from __future__ import annotations

import re
from functools import lru_cache

# Words that say nothing of what is wanted.
_NOTHING = """
    a an the i me my you your it its is are be been to of in on at for and or that this these there here have has do
    does did can could will would please with from so then just we our us him her them as by up out all any some one
    into not der die das den dem ein eine einen im mir mich ist und zu von bitte el la los las un una de del en que y
    por mi es le les des du et dans
"""
# Words that mean the same here. A stroke after a word: whatever begins with it.
MEANINGS = {
    "folder": (
        "folder- subfolder- director- subdir- dir ordner verzeichnis carpeta- directorio- dossier- 폴더- 디렉- "
        "文件夹- 目录- フォルダ-"
    ),
    "file": "file- fichier- datei- archivo- fichero- document- dokument- 파일- 文件- ファイル-",
    "show": (
        "show- display- list- ls overview- zeig- zeige- übersicht- auflist- muestra- mostrar muéstra- liste "
        "affiche- montre- 보여- 알려- 列出- 显示- 看-"
    ),
    "read": "read- open- lies lese- öffne- lee leer abre- ouvre- lis 읽- 열- 内容- 打开- 读-",
    "here": "here hier aquí ici around 여기- 这里- 这儿- ここ-",
    "say": "say- contain- content- written steht- inhalt- dice contien- 적혀- 写-",
    "create": (
        "create- make- generat- erstell- erzeug- anleg- leg mkdir touch crea- crear- haz crée- créer- 만들- 생성- "
        "创建- 新建- 作成-"
    ),
    "write": (
        "write- save- store- put jot schreib- speicher- notier- escrib- guarda- écri- enregistr- 저장- 写入- 保存-"
    ),
    "add": (
        "add adds added adding append- apend- insert- attach- hänge- füge- anhäng- anfüg- hinzu- ergänz- añad- "
        "agreg- ajout- 추가- 添加- 加上- 追加-"
    ),
    "end": "end bottom under below ende unten final fin debajo 끝- 末尾-",
    "change": (
        "change- set replac- swap- substitut- correct- fix- updat- edit- modif- turn ersetz- änder- korrigier- "
        "tausch- enabl- disabl- increas- decreas- bump- rais- lower- switch- adjust- alter altering instead "
        "anpass- statt anstatt cambi- reemplaz- sustitu- corrig- actualiz- ajust- remplac- 바꿔- 바꾸- 변경- "
        "수정- 改- 替换- 修改-"
    ),
    "rename": "renam- umbenenn- benenn- renombr- renomm- 이름을- 重命名- 改名-",
    "move": "move moving verschieb- muev- mover déplac- 옮- 이동- 移动- 移到-",
    "copy": "copy copying copied duplicat- clone- backup- kopier- copia copiar 복사- 复制- 拷贝-",
    "delete": (
        "delet- remov- erase- rid trash- discard- throw- lösch- entfern- borra- elimin- quita- supprim- efface- "
        "enlève- 삭제- 지워- 지우- 删除- 删掉- 削除-"
    ),
    "find": "find- search- locat- grep such- finde- busca- encuentr- cherch- 찾- 검색- 查找- 搜索- 找-",
    "mention": (
        "mention- appear- occur- word talk- vorkomm- erwähn- aparec- palabra- menciona- wort 단어- 提到- 出现-"
    ),
    "count": "count- many number often anzahl viele wieviel- zähl- cuánt- cuant- combien 몇- 개수- 多少- 几-",
    "line": "line- row- zeile- línea- linea- fila- ligne- 줄- 행- 行-",
    "run": (
        "run- execut- launch- start- ausführ- führe starte laufen ejecut- corre lance- exécut- 실행- 运行- 执行- 実行-"
    ),
    "command": "command- shell bash terminal script- program- befehl- skript- comando- 명령- 스크립- 命令- 脚本-",
    "remember": (
        "remember- forget- memori- memo keep note- mind merk- vergiss recuerd- acuérd- olvid- retiens souvien- "
        "기억- 잊지- 记住- 记下- 别忘-"
    ),
    "before": (
        "chat- conversation- gespräch- conversaci- 대화- 聊天- before earlier past previous- ago again once "
        "yesterday früher damals neulich letztens kürzlich recently lately antes antier récemment 전에- 예전- "
        "지난- 以前- 之前- 上次-"
    ),
    "told": (
        "told said gave mentioned talked discussed agreed decided settled erzählt- gesagt besprochen vereinbart "
        "dije conté hablamos acordamos raconté parlé 말했- 말한- 얘기했- 说过- 告诉- 聊过-"
    ),
    "remind": (
        "remind- reminder- wake alarm- schedul- erinner- weck- termin recuérd- recordar- avís- rappel- 알림- "
        "깨워- 提醒- 闹钟-"
    ),
    "when": (
        "tomorrow today tonight minute- hour- morgen heute stunde- mañana hoy hora- minuto- demain heure- 내일- "
        "오늘- 분 시간- 明天- 今天- 分钟- 小时-"
    ),
    "every": ("every each daily weekly hourly jede- täglich wöchentlich cada diari- chaque 매일- 매주- 마다- 每-"),
    "week": "weekday- week wochentag- woche semana 요일- 星期-",
    "web": (
        "web- online internet- google website- news weather latest netz wetter nachrichten- noticias clima météo "
        "뉴스- 날씨- 인터넷- 新闻- 天气- 网上- 上网-"
    ),
    "sort": "sort- order- alphabet- sortier- orden- 정렬- 排序-",
    "hello": "hello hi hey greetings hallo servus hola bonjour salut 안녕- 你好- こんにちは-",
    "thanks": "thank- thanks thx danke gracias merci 고마- 감사- 谢谢- ありがとう-",
    "bye": "bye goodbye cya tschüss adiós adios ciao 잘가- 再见-",
}

# Runs of words that mean what none of them does alone.
_PHRASES = {
    "before": (
        r"the other day|last (?:week|time|month|year|night)|letzte[ns]? (?:woche|mal|monat)|la última vez|l'autre jour"
    ),
    "told": r"(?<!where )did (?:we|i) (?:settle|agree|decide|discuss|talk|speak|say|tell|mention|plan|pick|choose)",
    "remember": (
        r"so you know|for (?:later|the record|next time|future reference)|fyi|(?:in|to) (?:your )?memory"
        r"|call me (?!at|in|on|when|back|an?\b)\w+"
    ),
    "delete": r"take (?:\w+ ){1,3}(?:off|out)|cross (?:\w+ ){1,3}(?:off|out)|leave (?:\w+ ){1,3}out",
    "add": r"put (?:\w+ ){1,4}on (?:(?:my|our|the) (?:\w+ )?list|it\b)",
    "within": r"(?:from|out of|off|aus)(?= +§path)",
    # The thing, which is no order to list.
    "collection": (
        r"(?:my|our|the|a|his|her|their|this|\w+ed|shopping|to-?do|guest|price) lists?(?! of)"
        r"|(?:the|my|our) (?:copy|backup)"
    ),
    "create": r"start an? (?:new )?(?=file|note|document)",
    "remind": (
        r"tell me(?= (?:(?:in|at) (?:\d+|an?\b)|tomorrow))"
        r"|(?:ping|nudge|notify|alert|poke|buzz|prompt|warn) me"
        r"|(?:let me know|give me a shout)(?= (?:in|at|every|when)\b)"
    ),
    "when": r"in (?:\d+|an?|half an) ?(?:m|mins?|h|hrs?|days?)|at (?:noon|midnight)",
    "find": r"look(?:ing)? for",
    "hello": r"^good (?:morning|evening|afternoon|day)|^guten (?:morgen|tag|abend)|^¡?buen[oa]s (?:días|tardes|noches)",
}


def _table() -> tuple[dict[str, str], list[tuple[str, str]]]:
    exact, beginnings = {}, []
    for meaning, words in MEANINGS.items():
        for word in words.split():
            if word.endswith("-"):
                beginnings.append((word[:-1], f"§{meaning}"))
            else:
                exact[word] = f"§{meaning}"
    return exact, sorted(beginnings, key=lambda pair: -len(pair[0]))


EMPTY = frozenset(_NOTHING.split())
_EXACT, _BEGINNINGS = _table()
_SAID_TOGETHER = [(re.compile(rf"(?<!\w)(?:{runs})\b"), f" §{meaning} ") for meaning, runs in _PHRASES.items()]
MEANT = frozenset(f"§{meaning}" for meaning in (*MEANINGS, *_PHRASES))


def together(text: str) -> str:
    """The text with each run of words that has a meaning as that meaning."""
    text = text.lower()
    for pattern, meaning in _SAID_TOGETHER:
        text = pattern.sub(meaning, text)
    return text


@lru_cache(maxsize=4096)
def meanings_of(word: str) -> list[str]:
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
