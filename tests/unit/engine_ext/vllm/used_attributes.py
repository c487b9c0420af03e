"""What a module of ours takes of vLLM's objects: attributes, by their names.

Theirs is what is imported from vLLM, what is annotated as a type of theirs or as Any, and what
comes of these by attributes, items and calls; and of `self` what the class does not define. What a
function of ours answers is ours.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
OF_PYTHON = {name for kind in (dict, list, set, str) for name in dir(kind)}
BY_NAME = ("delattr", "getattr", "hasattr", "setattr")
HANDS_ON = ("enumerate", "getattr", "list", "sorted", "zip")


def taken(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set(_taken_in(tree, set(_imported(tree))))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= _inherited(node)
    return {name for name in found - OF_PYTHON if not name.startswith("__")}


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if str(module).split(".")[0] == "vllm":
                yield from (one.asname or one.name for one in node.names)


def _taken_in(scope: ast.AST, theirs: set[str]) -> Iterator[str]:
    inner, nodes = _split(scope)
    while more := {name for node in nodes for name in _bound(node, theirs)} - theirs:
        theirs = theirs | more
    for node in nodes:
        yield from _attribute(node, theirs)
    for function in inner:
        arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
        given = {each.arg for each in arguments if _is_typed(each.annotation, theirs)}
        yield from _taken_in(function, theirs - {each.arg for each in arguments} | given)


def _split(scope: ast.AST) -> tuple[list[Function], list[ast.AST]]:
    """The functions in it, and what is in none of these."""
    inner: list[Function] = []
    nodes, todo = [], list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, Function):
            inner.append(node)
        else:
            nodes.append(node)
            todo += ast.iter_child_nodes(node)
    return inner, nodes


def _bound(node: ast.AST, theirs: set[str]) -> Iterator[str]:
    """Names that are theirs after it."""
    if isinstance(node, ast.AnnAssign) and _is_typed(node.annotation, theirs):
        yield from _names(node.target)
    for target, value in _bindings(node):
        if _is_theirs(value, theirs):
            yield from _names(target)


def _bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=True)
            else:
                yield target, node.value
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.NamedExpr):
        yield node.target, node.value


def _names(target: ast.AST) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _attribute(node: ast.AST, theirs: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _is_theirs(node.value, theirs):
        yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
        asked, name = node.args[:2]
        if isinstance(name, ast.Constant) and _is_theirs(asked, theirs):
            yield str(name.value)


def _is_typed(annotation: ast.expr | None, theirs: set[str]) -> bool:
    if annotation is None:
        return False
    text = ast.unparse(annotation).strip("'")
    words = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return text == "Any" or bool(words & theirs)


def _is_theirs(value: ast.expr, theirs: set[str]) -> bool:
    match value:
        case ast.Name():
            return value.id in theirs
        case ast.Attribute() | ast.Subscript() | ast.Await() | ast.Starred():
            return _is_theirs(value.value, theirs)
        case ast.ListComp() | ast.GeneratorExp():
            return _is_theirs(value.elt, theirs)
        case ast.BoolOp():
            return any(_is_theirs(each, theirs) for each in value.values)
        case ast.IfExp():
            return _is_theirs(value.body, theirs) or _is_theirs(value.orelse, theirs)
        case ast.Call(func=ast.Name(id=name)) if name in HANDS_ON:
            return any(_is_theirs(each, theirs) for each in value.args)
        case ast.Call():
            return _is_theirs(value.func, theirs)
    return False


def _inherited(cls: ast.ClassDef) -> set[str]:
    """Of what it derives from, or is mixed with; `super()` is asked for what it overrides."""
    own = {node.name for node in cls.body if isinstance(node, Function)}
    fields = [node for node in cls.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    own |= {name for field in fields for name in _names(field)}
    read: set[str] = set()
    overridden: set[str] = set()
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            if of == "self":
                (own if isinstance(node.ctx, ast.Store) else read).add(node.attr)
            elif of == "super()":
                overridden.add(node.attr)
    return (read - own) | overridden
