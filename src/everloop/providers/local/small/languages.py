"""In which language a request is written, as far as a small model must see examples in that one."""

from __future__ import annotations

import re

LATIN = "§latin"

# Small words that tell languages apart which are written in the same letters.
_TONGUES = {
    "§latin": (
        "the a an is are of to and what which who where when my me i you it this that for with how many please file "
        "files folder line add create make change replace find show read write run remember remind tell not do does did"
    ),
    "§german": (
        "der die das dem den ein eine einen ist sind im und nicht ich mir mich mein meine wie wer wo wann welche "
        "welcher welches welchem bitte zeig zeige auf mit für von zu hat gibt es datei dateien ordner zeile schreib "
        "schreibe heißt wort was steht ersetze benenne lösche führe durch erstelle erinnere merk hallo danke "
        "soll sollen heißen ab jetzt noch mal auch aus bei nach um dass lass mach leg gib kannst habe haben liegt füge "
        "hänge ändere erinner jede jeden keine"
    ),
    "§spanish": (
        "el la los las un una en es que qué cuál cuánto cuántas cuántos cómo dónde quién mi por para con del al "
        "archivo archivos carpeta línea añade crea cambia borra ejecuta recuerda recuérdame hola gracias y hay "
        "se está tengo puedes favor dime pon cada este esta esto aquí abre lee muéstrame"
    ),
    "§french": (
        "le la les un une est dans que quel quels quelle quelles fichier fichiers dossier ligne ajoute crée et pour "
        "avec du des mon ma moi bonjour merci qui où combien ici je tu "
        "ce cette mes dis donne fais mets peux montre plaît chaque sur supprime renomme"
    ),
}
_TONGUE_WORDS = {tongue: frozenset(words.split()) for tongue, words in _TONGUES.items()}

# The beginnings of the names of days, Sunday first, as cron counts them.
_DAYS = (
    r"\bsundays?\b|sonntag|doming|dimanche|일요일|(?:星期|周)[日天]",
    r"\bmondays?\b|montag|\blunes\b|\blundi|월요일|(?:星期|周)一",
    r"\btuesdays?\b|dienstag|\bmartes\b|\bmardi|화요일|(?:星期|周)二",
    r"\bwednesdays?\b|mittwoch|miércoles|mercredi|수요일|(?:星期|周)三",
    r"\bthursdays?\b|donnerstag|\bjueves\b|\bjeudi|목요일|(?:星期|周)四",
    r"\bfridays?\b|freitag|\bviernes\b|vendredi|금요일|(?:星期|周)五",
    r"\bsaturdays?\b|samstag|sábado|samedi|토요일|(?:星期|周)六",
)

_CLOCK = re.compile(
    r"(?<![\d:.])(?:(?P<hour>\d{1,2}):(?P<minute>\d{2})(?![\d:])"
    r"|(?P<full>\d{1,2}) ?(?:[ap]\.?m\b|uhr\b(?! *\d)|o'clock|heures?\b(?! *\d)))",
    re.I,
)
_LATE = re.compile(
    r"\d ?p\.?m\b|\b(?:afternoon|evening|abends?|nachmittags?|tarde|noche|soir)\b|오후|저녁|下午|晚上", re.I
)
_EARLY = re.compile(r"\d ?a\.?m\b", re.I)


def weekday(text: str) -> str:
    """The one day of the week that is named, as cron writes it, or nothing."""
    named = [str(number) for number, names in enumerate(_DAYS) if re.search(names, text, re.I)]
    return named[0] if len(named) == 1 else ""


def clock(text: str) -> tuple[str, str]:
    """The minute and the hour of the one time of day that is named for sure, as cron writes them, or nothing."""
    named = {(int(found["hour"] or found["full"]), int(found["minute"] or 0)) for found in _CLOCK.finditer(text)}
    if len(named) != 1:
        return "", ""
    hour, minute = named.pop()
    if _LATE.search(text) and hour < 12:
        hour += 12
    elif _EARLY.search(text) and hour == 12:
        hour = 0
    return (str(minute), str(hour)) if hour < 24 and minute < 60 else ("", "")


def script(text: str) -> str:
    """Which letters it is written in: examples in the same ones come first."""
    if any("\uac00" <= letter <= "\ud7a3" for letter in text):
        return "§korean"
    if any("\u3040" <= letter <= "\u30ff" for letter in text):
        return "§japanese"
    if any("\u4e00" <= letter <= "\u9fff" for letter in text):
        return "§chinese"
    return LATIN


def tongue(text: str) -> str:
    """Which language it is in, as far as that matters: its letters, or one of those that have examples here."""
    if (letters := script(text)) != LATIN:
        return letters
    said = {word.strip(".,:;!?¿¡()") for word in text.lower().split()}
    # English first: where two have as many words, it is the one that was meant.
    return max(_TONGUE_WORDS, key=lambda name: len(said & _TONGUE_WORDS[name]))
