"""Which names a piece of Python takes from elsewhere, and which it defines."""

import ast
import builtins
import sys
from collections.abc import Collection, Iterable

_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__"}


def free_names(code: str, known: Collection[str] = ()) -> list[str]:
    """Names that are read but bound nowhere in ``code``, in order.

    Python's own are left out, but for those in ``known``, which something else redefines.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(code)
    bound = _bound(ast.walk(tree))
    read = [
        (node.lineno, node.col_offset, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    ]
    names = dict.fromkeys(name for _, _, name in sorted(read))
    return [n for n in names if n not in bound and (n in known or n not in _BUILTINS)]


def defined_names(code: str, *, imported: bool = True) -> set[str]:
    """Names that the statements of ``code`` bind at its top level; none where it is no Python.

    Args:
        imported: whether imports count.
    """
    names: set[str] = set()
    for statement in _statements(code):
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and not imported:
            continue
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(statement.name)
        else:
            names |= _bound(ast.walk(statement))
    return names


def imports_of(names: Collection[str], code: str) -> tuple[list[str], set[str]]:
    """Statements that import ``names`` as ``code`` does, or from the standard library.

    Returns them with the names that they bind.
    """
    statements: dict[str, None] = {}
    found: set[str] = set()
    for statement in _statements(code):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            bound = _bound(statement.names)
            if bound & set(names):
                statements[ast.unparse(statement)] = None
                found |= bound & set(names)
    for name in names:
        if name not in found and name in sys.stdlib_module_names:
            statements[f"import {name}"] = None
            found.add(name)
    return list(statements), found


def _statements(code: str) -> list[ast.stmt]:
    try:
        return ast.parse(code).body
    except SyntaxError:
        return []


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names
