"""Decide by the surrounding prose whether a model makes a JSON call, or only shows one.

Calls between marks (`<tool_call>`) are unambiguous. Bare objects are not: "Let me look. {…}" is a call, "a call looks
like this: {…}" is not. The lists cover the most common languages of answers. In any other language, a call counts if
only white space precedes it on its line and nothing follows it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

WINDOW = 300  # characters that are examined of the prose before a call, and of the line after it


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


_RUN = r"(?:\w+ )?(?:run|call|called|execute|executed|use|send|sent|invoke|invoked|make|made|issue)\b"
_NOT = r"\b(?:not|don['’]t|didn['’]t|never|cannot|can['’]t|won['’]t)"

# The text shows a call without making it.
_EXAMPLE = _any(
    r"\b(?:examples?|e\.g\.|for instance|samples?|schemas?|illustrat\w+|templates?|hypothetical\w*|placeholder)\b",
    r"\b(?:could|might|would(?! like to)|imagine|suppose|pretend|instead of|rather than|such as)\b",
    r"\bI['’]d\b(?! like to)",
    r"\b(?:looks?|looked|goe?s?|works?|written|something|call|use) like\b|\blike (?:this|so|that)\b",
    r"\bhow (?:to|you|one|it|a|the|this|that)\b|\b(?:this|that) is how\b",
    r"\b(?:show|tell|give) you\b|\b(?:explain|demonstrat|describ)\w*",
    r"\byou (?:can|may|should|must|need|will|have|write|call|send|get|use)\b",
    r"\bone (?:can|would|writes|calls|sends|uses)\b|\blet me know\b|\bwhat you think\b",
    # Advice for the user, and reports of what was done.
    r"^\W*(?:please )?(?:try|run|paste|copy|put|add|send|use|save|insert|enter|type|write)\b",
    r"\b(?:recommend|suggest|advise)\w*|\bI(?:['’]ve| have(?! to))\b[^.]*:\W*$",
    r"\b(?:the|this|following) (?:json )?format\W*$",
    rf"{_NOT} (?:going to )?{_RUN}",
    r"\b(?:I|we|it|he|she|they|you) (?:called|wrote|sent|used|ran|made|tried|executed|invoked|issued|answered)\b",
    r"\bbeispiele?\b|\bbeispielsweise\b|\bz\. ?B\.|\bkönnten?\b|\bwürden?\b|\bsieht so\b|\bsähe\b",
    r"\bnicht (?:ausführen|aufrufen)\b",
    r"\bexemples?\b|\bpourrai\w*|\bressembl\w*|\bejemplos?\b|\bpodrí\w*|\besempi\w*|\bpotrebb\w*",
    r"\bexemplos?\b|\bpoderia\b|\bvoorbeeld\w*|\bzou\b|пример|例如|比如|示例|例子|例えば|예시|예를",
)

# The text is about calls. This counts only if nothing says that the model makes this one.
_ABOUT_CALLS = _any(
    r"\b(?:arguments?|parameters?|formats?|formatted|syntax|json|snippets?|payloads?|object|encoded|usage)\b",
    r"\b(?:sends?|sent|emits?|emitted|wrote|writes|written|logged|recorded|answered|returned|replied|responded)\b",
    r"\b(?:accepts?|expects?|takes|means|corresponds?|equivalent|defined|definitions?|config\w*|settings?)\b",
    r"\b(?:transcripts?|protocol|fixtures?|readme|documentation|docs|requests?|body|bodies|clients?|prompts?)\b",
    r"\b(?:training|dataset|specification|spec|standard)\b",
    r"\b(?:has|contains|says|reads|shows|is|are|was|gives|becomes|lautet|enthält|ist)\s*:\W*$",
    r"^#{1,6}\s(?!.*\b(?:call|action|step|tool)\b)",
)

_GERUND = (
    r"(?:calling|checking|creating|executing|fetching|finding|getting|inspecting|invoking|listing|loading|looking"
    r"|opening|querying|reading|running|scanning|searching|starting|trying|using|viewing|waiting|writing)\b"
)

_ACTION = (
    r"(?:begin|call|check|continue|create|execute|fetch|find|get|inspect|list|load|look|make|open|query|read|report|run"
    r"|scan|search|start|take|tell|try|use|view|write)\b"
)

# The model announces its next step.
_INTENT = _any(
    # "I found", "I suggest" and "I called" announce nothing.
    r"\bI(?:['’]ll| will| must| should| shall| can| have to| want to| need (?:to|the|more))\b",
    r"\bI(?:['’]m| am) going to\b|\bI(?: would|['’]d) like to\b",
    rf"\bI(?:['’]m| am)?(?: (?:first|now|then|just|quickly|also))* (?:{_ACTION}|{_GERUND})",
    r"\b(?:let me|let['’]s|let us|allow me)\b|\bwe(?:['’]ll|['’]re| (?:need|should|must|will|have to|first|now))\b",
    r"\b(?:going|time|about) to\b|\bneeds? to be\b",
    # "Reading the file." announces; "Reading a file:" may be a heading.
    rf"^\W*(?:(?:now|first|next|then|currently|just)\b\W*)?{_GERUND}[^:]*$",
    rf"^\W*{_GERUND} (?:it|them|that|the (?:tool|function))\b|(?<!is )\bnow\W*$",
    r"\bhere(?:['’]s| is) (?:the|my) (?:tool |function )?call\W*$",
    r"^\W*(?:one|just a|a) (?:moment|second)\b|^\W*(?:please )?(?:wait|hold on)\b",
    r"\b(?:on it|right away)\W*$|\bhere (?:goes|we go)\b",
    # A complete sentence, not "Sure, here is the JSON".
    r"^\W*(?:ok(?:ay)?|sure(?: thing)?|certainly|of course|alright|all right|got it|understood|absolutely|yes|gladly"
    r"|no problem|gerne|klar|natürlich|gut|verstanden|bien sûr|d['’]accord|claro|vale|certo|va bene)\W*$",
    r"^\W*(?:my |the )?(?:next )?(?:(?:tool|function)[ _-]?(?:calls?|use)|action|step \d+)\W*$",
    r"\b(?:ich|wir)\b(?! (?:habe|haben|hatte|hatten)\b)|\blasst? (?:mich|uns)\b|\bmoment\W*$|\bschaue?\b",
    r"\b(?:je |j['’])(?:vais|regarde|vérifie|lis|cherche|dois|commence|liste|ouvre|appelle|lance)\b",
    r"\blaissez?[- ]moi\b|\bvoyons\b",
    r"\b(?:voy a|déjame|déjeme|vamos a|permíteme|necesito|veamos|miro|busco|leo)\b",
    r"\b(?:vou|deixe-me|deixa-me|preciso|vamos)\b",
    r"\b(?:controllo|guardo|vediamo|leggo|cerco|devo|fammi|lasciami)\b|\b(?:ik|laat me)\b",
    r"\b(?:сейчас|давайте|посмотрю|проверю|прочитаю|мне нужно)\b",
    r"让我|我来|我将|我会|我先|我需要|首先|確認し|見てみ|調べ|読みます|확인|살펴",
)

# The line after a call says that it was shown and not made.
_SHOWN = _any(
    r"\b(?:this|that|it|which|here) (?:is|was|would be) (?:(?:just|only|merely|simply) )?"
    r"(?:how|what|an?|one|the (?:way|format|form|shape))\b",
    r"\bis how\b|\b(?:this|that|it|which|above|call|object|json|snippet|command|one) (?:would|could|might)\b",
    r"\b(?:this|that|which|above|call|object|json|snippet|command) (?:shows|illustrates|demonstrates|means|says)\b",
    r"\bthe above\b|\babove (?:call|json|example|snippet|object|command)\b",
    r"\bexamples?\b.{0,20}\b(?:call|only|above|json)|\bthis example\b|\bfor (?:example|instance)\b|\be\.g\.",
    r"\byou (?:can|could|may|might|would|should|must|need|will|have)\b",
    r"^\W*(?:replace|adjust|substitute|change|note that|note:|where|here,|with this|in this)\b",
    r"^\W*and (?:so|then) (?:on|the)\b",
    r"^\W*the (?:name|path|arguments?|parameters?|field|key|value)s?\b",
    rf"{_NOT} {_RUN}",
    r"\bso (?:sieht|funktioniert|geht|ruft|würde)\b|\bbeispiel|\bwürden?\b|\bkönnten?\b|\bkannst\b|\bkönnen sie\b",
    r"\bpar exemple\b|\bpor ejemplo\b|\bad esempio\b|\bpor exemplo\b|\bbijvoorbeeld\b",
    r"\bvoilà comment\b|\basí es como\b|\becco come\b|пример|例如|示例|例えば|예시",
)

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)*_]*\s+|\n\s*|(?<=[。！？])\s*(?!\Z)")
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_ENDS_SENTENCE = re.compile(r"[.!?…:。！？：][\"'”’)*_]*\s*\Z")
_CALL_VERB = re.compile(r"\b(?:call|calling|use|using|run|running|execute|executing|invoke|invoking)\s*\Z", re.I)
_ONLY_PUNCTUATION = re.compile(r"[\s.!…。]*\Z")


@lru_cache(maxsize=8)  # called again for the same place as more text arrives
def lead_of(before: str) -> Literal["intent", "example", "neutral"]:
    """Return what the prose before a call announces: a call, an example, or neither.

    The last sentence counts most; if it announces nothing, an example in the last paragraph counts, too.
    """
    before = before[-WINDOW:].strip()
    last = _SENTENCE_END.split(before)[-1]
    if _EXAMPLE.search(last):
        return "example"
    if _INTENT.search(last):
        return "intent"
    paragraph = "\n".join(_PARAGRAPH.split(before)[-2 if last.endswith(":") else -1 :])
    return "example" if _EXAMPLE.search(paragraph) or _ABOUT_CALLS.search(last) else "neutral"


def ends_sentence(before: str) -> bool:
    """Return whether the prose before a call is a complete sentence, or introduces the call with a colon."""
    return _ENDS_SENTENCE.search(before) is not None


def introduces_call(before: str) -> bool:
    """Return whether a call may follow this prose on the same line: "Let me look. {…}", "I will now call {…}"."""
    return (ends_sentence(before) or _CALL_VERB.search(before) is not None) and lead_of(before) == "intent"


def is_made(before: str, behind: str, *, same_line: bool) -> bool:
    """Return whether a call is made and not only shown, by the prose before it and the line after it."""
    if _ONLY_PUNCTUATION.match(behind):
        return True
    if _SHOWN.search(behind):
        return False
    if (same_line or before.strip()) and (behind[:1].islower() or behind[:1] in ",;)]`\"'"):  # a sentence goes on
        return False
    if not same_line and not before.strip():
        return True
    if same_line and before.rpartition("\n")[2].strip() and not ends_sentence(before):
        return False
    first = _SENTENCE_END.split(behind.strip())[0]  # "I will report what I find" also announces the call
    return lead_of(before) == "intent" or (_INTENT.search(first) is not None and _EXAMPLE.search(behind) is None)
