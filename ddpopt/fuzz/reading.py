"""Reading a drawn model back from its text, without running the text.

A case comes from another machine, a database or a mail: it may name models and steps, and nothing else.
Invariant: ``read_model(repr(model)) == model``, and no other call, name or attribute is followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from ddpopt.errors import UsageError
from ddpopt.testing.drawn import DrawnModel, step

_CALLS: dict[str, Callable[..., Any]] = {"DrawnModel": DrawnModel, "step": step}


def read_model(text: str) -> DrawnModel:
    """Read what ``repr`` wrote.

    Args:
        text: ``DrawnModel(...)``, made of ``step(...)`` and literals.

    Returns:
        An equal model.

    Raises:
        UsageError: the text is something else, or names a block that is not registered.
    """
    try:
        found = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise UsageError(f"expected the repr of a DrawnModel, got {text[:80]!r}: {error}") from error
    if not isinstance(found, DrawnModel):
        raise UsageError(f"expected the repr of a DrawnModel, got {text[:80]!r}")
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            keywords = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
            return _CALLS[name](*map(_value, node.args), **keywords)
        case ast.Tuple(elts=items):
            return tuple(map(_value, items))
        case _:
            return ast.literal_eval(node)
