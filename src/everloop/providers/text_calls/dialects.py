"""The dialects as data: which marks begin and end calls, reasoning and answers, and where each of them may begin.

To add a family, add a line to `FAMILIES`; `bodies` recognises what is between its marks by its content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Family:
    """A way to mark calls: what begins them, and what ends them."""

    opening: str
    ends: str = ""  # a pattern; by default the closing tag
    body: str = ""  # the end of the opening mark, if it is part of the body
    argument: str = ""  # what separates the name of an offered tool, which must follow, from its arguments
    exact: bool = False  # its template puts no line breaks around values


FAMILIES = (
    Family("<tool_call>", r"</(?:tool|function)_call>|<tool_response>"),  # Hermes, Qwen, GLM and many others
    Family("<function_call>", r"</(?:tool|function)_call>"),
    Family("<tool_calls>"),  # Jamba, Hunyuan
    Family("<function_calls>"),
    Family("<TOOLCALL>"),  # Nemotron Nano 2
    Family("<longcat_tool_call>"),
    Family("<dots_function_call>"),
    Family("<minimax:tool_call>"),  # MiniMax M2
    Family("<seed:tool_call>", exact=True),
    Family("<atem:function_calls>"),  # Muse
    Family("<｜DSML｜function_calls>"),  # DeepSeek V3.2
    Family("<｜DSML｜tool_calls>"),  # DeepSeek V4
    Family("<｜DSML｜ calls>"),  # DeepSeek V4.1
    Family("<start_function_call>", "<end_function_call>"),  # FunctionGemma
    Family("<|tool_call>", r"<tool_call\|>"),  # Gemma 4
    Family("<|tool_call|>", r"<\|/tool_call\|>|</tool_call>|<\|end_of_text\|>"),  # Granite, Phi-4-mini
    Family("<|tool_call_start|>", r"<\|tool_call_end\|>"),  # LFM2
    Family("<|tools_prefix|>", r"<\|tools_suffix\|>"),  # Apertus
    Family("<|python_tag|>", r"<\|eom_id\|>|<\|eot_id\|>"),  # Llama 3
    Family("<|python_start|>", r"<\|python_end\|>|<\|eom\|>|<\|eot\|>"),  # Llama 4
    Family("<|START_ACTION|>", r"<\|END_ACTION\|>"),  # Command A
    Family("<|action_start|>", r"<\|action_end\|>"),  # InternLM
    Family("<｜tool▁calls▁begin｜>", r"<[｜|]tool▁calls▁end[｜|]>"),  # DeepSeek
    Family("<|tool▁calls▁begin|>", r"<[｜|]tool▁calls▁end[｜|]>"),
    Family("<｜tool▁call▁begin｜>", r"<｜tool▁call▁end｜>"),
    Family("<｜tool_calls_begin｜>", r"<｜tool_calls_end｜>"),  # Step 3
    Family("<|tool_calls_section_begin|>", r"<\|tool_calls_section_end\|>"),  # Kimi K2
    Family("<|tool_call_begin|>", r"<\|tool_call_end\|>"),
    Family("<|open|>tools<|sep|>", r"<\|close\|>tools<\|sep\|>"),  # Kimi K3
    Family("]<]minimax[>[<tool_call>", r"\]<\]minimax\[>\[</tool_call>"),  # MiniMax M3
    Family("[TOOL_CALLS]", r"</s>|(?=\[TOOL_CALLS\])"),  # Mistral
    Family("[TOOL_REQUEST]", r"\[END_TOOL_REQUEST\]"),  # LM Studio
    Family("<function=", r"</function>", body="<function="),  # Qwen-coder, Llama 3
    Family("<function name=", r"</function>", body="<function name="),  # MiniCPM 5
    Family("<invoke name=", r"</invoke>", body="<invoke name="),
    Family("<｜DSML｜invoke name=", r"</｜DSML｜invoke>", body="<｜DSML｜invoke name="),
    Family("<｜DSML｜ invoke name=", r"</｜DSML｜ invoke>", body="<｜DSML｜ invoke name="),
    Family("<steptml:invoke name=", r"</steptml:invoke>", body="<steptml:invoke name="),
    Family("functools[{", r"<\|im_end\|>|<\|end\|>", body="[{"),  # FireFunction, Phi-4-mini
    Family("function call<|role_sep|>", r"<\|message_sep\|>|</s>"),  # GigaChat 3
    Family("<|function_call|>", r"<\|message_sep\|>|</s>"),
    Family("<|recipient|>", r"<\|stop\|>|(?=<\|from\|>)", argument="<|content|>"),  # Functionary 2
    Family(">>>", r"<\|eot_id\|>|<\|eom_id\|>|(?=>>>)", argument="{"),  # Functionary 3
    Family("Action:", r"\n\s*(?:Observation|Thought|Final Answer):", argument="Action Input:"),  # ReAct
)
SPECIAL = ("<|", "<｜", "]<")  # beginnings of special tokens, which no model writes in prose
BY_OPENING = {family.opening: family for family in FAMILIES}
OPENINGS = tuple(sorted(BY_OPENING, key=len, reverse=True))
_TAG_ENDS = {one.opening: f"</{one.opening[1:]}" for one in FAMILIES if not one.ends}
ENDS = {one.opening: re.compile(one.ends or _TAG_ENDS[one.opening]) for one in FAMILIES}

# What may follow the mark around calls.
INNER = (
    "{", "[", "```", *(one.body for one in FAMILIES if one.body), "<tool_call>", "<｜tool▁call▁begin｜>",
    "<|tool▁call▁begin|>", "<｜tool_call_begin｜>", "<|tool_call_begin|>", "<atem:invoke name=", "<|open|>call tool=",
    "]<]minimax[>[<invoke name=", "<|plugin|>",
)  # fmt: skip
# What may follow a name after a mark.
AFTER_NAME = (
    "<arg_key>", "<longcat_arg_key>", "<tool_sep>", "(", "[ARGS]", "[CALL_ID]", "{", "<｜tool▁sep｜>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
CLOSERS = ("</", "<|", "<｜")  # beginnings of what may follow the name of a call without arguments
# The tags around a model's reasoning. Many models start inside it, since the prompt template has opened the tag for
# them.
THOUGHT_TAGS = {
    "<think>": "</think>", "<thinking>": "</thinking>", "<seed:think>": "</seed:think>", "<mm:think>": "</mm:think>",
    "<longcat_think>": "</longcat_think>", "[think]": "[/think]", "◁think▷": "◁/think▷",
    "<|start_thinking|>": "<|end_thinking|>", "<|inner_prefix|>": "<|inner_suffix|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>", "<|channel>thought": "<channel|>",
}  # fmt: skip
THOUGHT_ENDS = {tag: re.compile(re.escape(end), re.IGNORECASE) for tag, end in THOUGHT_TAGS.items()}
STRAY_ENDS = tuple(end for end in THOUGHT_TAGS.values() if end != "<channel|>")
# The tags that some models put around an answer. Words count only after reasoning: a user may have asked for the tag.
WRAPPERS = ("<answer>", "<response>", "</answer>", "</response>")
WRAPPER_TOKENS = (
    "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|open|>response<|sep|>",
    "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>", "<|message_sep|>",
)  # fmt: skip
# Tokens between or after calls that have no meaning.
NOISES = (
    "</s>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>", "<|observation|>",
    "<｜tool_calls_end｜>", "<|/tool_call|>", "<|stop|>", "<|from|>assistant", "</tool_call>", "</function_call>",
    "</function>", "</answer>", "</response>", *WRAPPER_TOKENS, *_TAG_ENDS.values(),
)  # fmt: skip
NOISE = re.compile(rf"(?:[\s,;]|{'|'.join(map(re.escape, NOISES))})*")
# Messages with a header that names their channel or recipient: gpt-oss, Muse.
HARMONY_BEGIN = ("<|start|>", "<|channel|>")
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>")
HARMONY_TOKENS = (*HARMONY_BEGIN, *HARMONY_ENDS, "<|message|>", "<|constrain|>")
HARMONY_END = re.compile("|".join(map(re.escape, HARMONY_ENDS)) + r"|(?=<\|start\|>|<\|channel\|>)")

# The places where something other than text may begin.
KINDS = {
    **{one: "line_mark" if one[0].isalpha() else "mark" for one in OPENINGS},
    **dict.fromkeys(HARMONY_TOKENS, "harmony"),
    **dict.fromkeys(THOUGHT_TAGS, "thought"),
    **dict.fromkeys(STRAY_ENDS, "stray"),
    **dict.fromkeys((*WRAPPERS, *WRAPPER_TOKENS), "wrapper"),
    "<tools>": "tools",
}
LINE_KINDS = frozenset({"tools", "line_mark", "list", "object", "fence"})  # count only at the beginning of a line
CALL_KINDS = frozenset({"tools", "line_mark", "mark", "list", "object"})  # count only if tools were offered
_QUOTES = "[`\"'\\\\]"  # a tag after one of these is only mentioned


def _tokens() -> Iterator[str]:
    """Yield the alternatives of `TOKENS`. Each begins with a literal character, which keeps the search fast."""
    for first in sorted({one[0] for one in KINDS}):
        tails = [
            f"(?i:{re.escape(one[1:])})" if KINDS[one] in ("thought", "stray") else re.escape(one[1:])
            for one in sorted(KINDS, key=len, reverse=True)
            if one[0] == first
        ]
        yield rf"{re.escape(first)}(?<!{_QUOTES}{re.escape(first)})(?:{'|'.join(tails)})"
    yield from (r"\[(?P<list>(?=\s*(?:[{A-Za-z_]|\Z)))", r"\{(?P<object>(?=\{?\s*(?:[\"']|\Z)))", "`(?P<fence>`{2,})")


def _beginnings(literals: Iterable[str]) -> frozenset[str]:
    """Return all proper prefixes of these: more text may complete them."""
    return frozenset(one[:size] for one in literals for size in range(len(one)))


TOKENS = re.compile("|".join(_tokens()))
_LITERALS = (*KINDS, *NOISES, "```", "<channel|>")
MAX_LITERAL = max(map(len, _LITERALS))
FIRSTS = re.compile(f"[{re.escape(''.join({one[0] for one in _LITERALS}))}]")
BEGINNINGS = _beginnings(one.lower() for one in _LITERALS)
INNER_BEGINNINGS = _beginnings(INNER)
AFTER_NAME_BEGINNINGS = _beginnings((*AFTER_NAME, *CLOSERS))
