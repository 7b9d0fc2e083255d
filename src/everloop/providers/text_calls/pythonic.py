"""Calls written as Python: `[read_file(path="a"), list_dir()]`, or one a line as Gemma's tool_code."""

from __future__ import annotations

import ast
import re
import warnings

from .mending import EVALUABLE, as_json, literal
from .shapes import MAX_CALLS, Written

BEGINS = re.compile(r"\s*(?:\w{1,60}\s*=\s*)?(?:print\(\s*)?([A-Za-z_][\w.]{0,120})\(")
MAY_BEGIN = re.compile(r"\s*(?:\w{1,60}\s*|(?:\w{1,60}\s*=\s*)?(?:print\(?\s*)?[\w.]{0,120})\Z")


def read_python(text: str) -> list[Written] | None:
    """The calls that a text of Python consists of; None if there is anything else in it."""
    text = text.strip()
    if not text or len(text) > EVALUABLE:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        calls: list[Written] = []
        for statement in tree.body:
            if isinstance(statement, ast.Expr | ast.Assign):
                calls += _calls(statement.value)
            else:
                return None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
    return calls[:MAX_CALLS] or None


def _calls(node: ast.expr) -> list[Written]:
    if isinstance(node, ast.List | ast.Tuple):
        return [call for element in node.elts for call in _calls(element)]
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = _name(node.func)
    if name == "print" and len(node.args) == 1 and not node.keywords:
        return _calls(node.args[0])
    if name.endswith(".call"):  # how Llama calls what it calls built in
        name = name.removesuffix(".call")
    positional = [as_json(literal(argument)) for argument in node.args]
    named = {keyword.arg: as_json(literal(keyword.value)) for keyword in node.keywords}
    if None in named:
        raise ValueError("arguments that are not named")
    return [Written(name, {str(key): value for key, value in named.items()}, positional)]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise ValueError("no name")
