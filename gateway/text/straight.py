"""Chat templates as Python functions: those that do no more than put a conversation together, and those parts of the
others that do.

Jinja asks its context for every name, its sandbox for every field and a loop object for every turn. Here a field of a
dict is a look-up and a loop is Python's, so a short conversation is rendered in a quarter of the time
(benchmarks/gateway.md). What is written comes from Jinja's own tree of the template and uses the same operators on the
same values, with Jinja's undefined values where there are none; loops go over lists alone. Where a template leaves
that, and whatever goes wrong, ``Elsewhere`` is raised and Jinja renders the whole, as nothing here has effects.

Inner loops go over what belongs to an item of the outer one, so all takes time and memory in proportion to the
conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, nodes

Function = Callable[[Mapping[str, object]], str]
"""From a conversation's variables to its text. Raises Elsewhere, or anything, where Jinja has to say what it is."""

_OPERATORS = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}
_BETWEEN = {nodes.And: "and", nodes.Or: "or", nodes.Add: "+", nodes.Sub: "-", nodes.Mod: "%"}
"""Those that the sandbox does not watch."""
_LOOP = {
    "first": "(not {i})",
    "last": "({i} == len({items}) - 1)",
    "index": "({i} + 1)",
    "index0": "{i}",
    "length": "len({items})",
    "previtem": "({items}[{i} - 1] if {i} else nothing)",
    "nextitem": "({items}[{i} + 1] if {i} + 1 < len({items}) else nothing)",
}
_SPECIAL = frozenset(("loop", "self", "super", "caller", "varargs", "kwargs"))
DICT_NAMES = frozenset(dir(dict))
"""For these ``message.items`` is the method, as Jinja has it; for all other names the value under the key."""


class Elsewhere(Exception):
    """This needs Jinja."""


def straight(tree: nodes.Template, environment: Environment, known: Mapping[str, object]) -> Function | None:
    """None where every conversation would need Jinja. ``known``: variables that conversations need not bring."""
    writer = _Writer(environment, known)
    try:
        writer.write(tree.body, _Scope(), 1)
    except Elsewhere:
        return None
    return writer.function()


class _Scope:
    """The template, or the body of a loop: what is set here is forgotten at its end."""

    def __init__(self, outer: _Scope | None = None, target: str = "", item: str = "", items: str = "") -> None:
        """``item``: the Python variable of the loop's ``target``; ``items``: that of the list."""
        self.outer = outer
        self.target = target
        self.items = items
        self.variables = {target: item} if target else {}
        """Python's, by the template's name."""
        self.unset: set[str] = set()
        """Names that are set further down."""
        self.num_conditions = 0
        """Around what is being written; at least so many."""


class _Writer:
    """Python for one template."""

    def __init__(self, environment: Environment, known: Mapping[str, object]) -> None:
        self._environment = environment
        self._known = known
        self._lines: list[str] = []
        self._asked: dict[str, str] = {}
        """Variables of the conversation by their names in the template."""
        self._constants: dict[str, Any] = {
            "known": known,
            # Whose it would be matters in errors alone, and those are Jinja's to tell.
            "nothing": environment.undefined(),
            "field": environment.getattr,
            "item": environment.getitem,
            "Elsewhere": Elsewhere,
        }
        self._num = 0

    def function(self) -> Function:
        """What was written."""
        head = ["def render(variables):", " pieces = []", " add = pieces.append", " get = variables.get"]
        for name, variable in self._asked.items():
            absent = f"known[{name!r}]" if name in self._known else "nothing"
            head.append(f" {variable} = get({name!r}, {absent})")
        source = "\n".join([*head, *self._lines, " return ''.join(pieces)"])
        scope = dict(self._constants)
        exec(compile(source, "<chat template>", "exec"), scope)
        function: Function = scope["render"]
        return function

    # Statements

    def write(self, body: Sequence[nodes.Node], scope: _Scope, depth: int) -> None:
        """The body of a scope, ``depth`` spaces in. Raises Elsewhere."""
        for name in dict.fromkeys(_assigned(body)):
            if name in _SPECIAL:
                raise Elsewhere
            if name != scope.target:
                outer = self._name(name, scope)
                scope.variables[name] = variable = self._new()
                scope.unset.add(name)
                self._line(depth, f"{variable} = {outer}")
        self._statements(body, scope, depth)

    def _statements(self, body: Sequence[nodes.Node], scope: _Scope, depth: int) -> None:
        self._line(depth, "pass")
        for node in body:
            match node:
                case nodes.Output():
                    for part in node.nodes:
                        text = self._value(part, scope) if _is_text(part) else f"str({self._value(part, scope)})"
                        self._line(depth, f"add({text})")
                case nodes.If():
                    self._if(node, scope, depth)
                case nodes.For():
                    self._for(node, scope, depth)
                case nodes.Assign(target=nodes.Name(name=name)):
                    self._line(depth, f"{scope.variables[name]} = {self._value(node.node, scope)}")
                    scope.unset.discard(name)
                case nodes.Continue():
                    self._line(depth, "continue")
                case nodes.Break():
                    self._line(depth, "break")
                case _:
                    raise Elsewhere

    def _if(self, node: nodes.If, scope: _Scope, depth: int) -> None:
        branches = [(node.test, node.body), *[(each.test, each.body) for each in node.elif_], (None, node.else_)]
        before, after = frozenset(scope.unset), set(scope.unset)
        for place, (test, body) in enumerate(branches):
            scope.unset = set(before)  # what one branch sets, the others have not
            scope.num_conditions += place > 0
            condition = "else" if test is None else f"{'elif' if place else 'if'} {self._value(test, scope)}"
            self._line(depth, f"{condition}:")
            scope.num_conditions += place == 0
            self._branch(body, scope, depth + 1)
            scope.num_conditions -= 1
            after &= scope.unset
        scope.unset = after

    def _branch(self, body: Sequence[nodes.Node], scope: _Scope, depth: int) -> None:
        """Whoever comes into a branch that leaves what can be written here goes elsewhere; the others need not."""
        num_lines = len(self._lines)
        try:
            self._statements(body, scope, depth)
        except Elsewhere:
            self._lines[num_lines:] = []
            self._line(depth, "raise Elsewhere")

    def _for(self, node: nodes.For, scope: _Scope, depth: int) -> None:
        if not isinstance(node.target, nodes.Name) or node.test is not None or node.recursive or node.else_:
            raise Elsewhere
        if node.target.name in _SPECIAL:
            raise Elsewhere
        mentioned = [node.iter, *node.iter.find_all(nodes.Name)]
        if scope.target and any(isinstance(each, nodes.Name) and each.name != scope.target for each in mentioned):
            raise Elsewhere  # what the inner loop goes over might be as long in each turn of the outer one
        items, item, index = self._new(), self._new(), self._new()
        self._line(depth, f"{items} = {self._value(node.iter, scope)}")
        self._line(depth, f"if type({items}) is not list: raise Elsewhere")
        self._line(depth, f"for {index}, {item} in enumerate({items}):")
        inner = _Scope(scope, node.target.name, item, items)
        inner.variables["loop"] = index
        self.write(node.body, inner, depth + 1)

    # Expressions

    def _value(self, node: nodes.Node, scope: _Scope) -> str:
        match node:
            case nodes.Const() if node.value is None or type(node.value) in (str, int, bool):
                return repr(node.value)
            case nodes.TemplateData(data=text):
                return repr(text)
            case nodes.Name() if node.name not in _SPECIAL:
                return self._name(node.name, scope)
            case nodes.Getattr(node=nodes.Name(name="loop")) if node.attr in _LOOP and scope.target:
                return _LOOP[node.attr].format(i=scope.variables["loop"], items=scope.items)
            case nodes.Getattr():
                return self._field("field", node.node, node.attr, "" if node.attr in DICT_NAMES else "dict", scope)
            case nodes.Getitem(arg=nodes.Const(value=str() as key)):
                return self._field("item", node.node, key, "" if key in DICT_NAMES else "dict", scope)
            case nodes.Getitem(arg=nodes.Const(value=int() as place)):
                return self._field("item", node.node, place, "list" if place >= 0 else "", scope)
            case nodes.Getitem(arg=nodes.Slice() as part):
                ends = [self._value(end, scope) if end else "" for end in (part.start, part.stop, part.step)]
                return f"{self._value(node.node, scope)}[{':'.join(ends)}]"
            case nodes.Compare():
                rest = [f"{_OPERATORS[operand.op]} {self._value(operand.expr, scope)}" for operand in node.ops]
                return f"({' '.join([self._value(node.expr, scope), *rest])})"
            case nodes.Not():
                return f"(not {self._value(node.node, scope)})"
            case nodes.And() | nodes.Or() | nodes.Add() | nodes.Sub() | nodes.Mod():
                between = _BETWEEN[type(node)]
                return f"({self._value(node.left, scope)} {between} {self._value(node.right, scope)})"
            case nodes.CondExpr() if node.expr2 is not None:
                then, test = self._value(node.expr1, scope), self._value(node.test, scope)
                return f"({then} if {test} else {self._value(node.expr2, scope)})"
            case nodes.List():
                return f"[{', '.join([self._value(each, scope) for each in node.items])}]"
            case nodes.Concat():
                return f"''.join([{', '.join([f'str({self._value(each, scope)})' for each in node.nodes])}])"
            case nodes.Filter() if node.node is not None:
                return self._call(self._environment.filters, node, scope)
            case nodes.Test():
                return self._call(self._environment.tests, node, scope)
            case _:
                raise Elsewhere

    def _name(self, name: str, scope: _Scope) -> str:
        found: _Scope | None = scope
        while found is not None and name not in found.variables:
            found = found.outer
        if found is None:
            if name not in self._asked:
                self._asked[name] = self._new()
            return self._asked[name]
        if name in found.unset and (found is not scope or scope.num_conditions):
            raise Elsewhere  # Jinja has its own ways with what is set further down
        return found.variables[name]

    def _field(self, by: str, owner: nodes.Node, key: str | int, kind: str, scope: _Scope) -> str:
        """``by``: "field" or "item", Jinja's way; ``kind``: of an owner of which a plain look-up says the same."""
        value = self._value(owner, scope)
        if not kind:
            return f"{by}({value}, {key!r})"
        name = value if isinstance(owner, nodes.Name) else self._new()
        asked = value if name == value else f"{name} := {value}"
        if kind == "dict":
            return f"({name}.get({key!r}, nothing) if type({asked}) is dict else {by}({name}, {key!r}))"
        return f"({name}[{key}] if type({asked}) is list and {key} < len({name}) else {by}({name}, {key}))"

    def _call(self, functions: Mapping[str, Any], node: nodes.Filter | nodes.Test, scope: _Scope) -> str:
        function = functions.get(node.name)
        if function is None or hasattr(function, "jinja_pass_arg") or node.dyn_args or node.dyn_kwargs:
            raise Elsewhere
        assert node.node is not None
        arguments = [self._value(each, scope) for each in (node.node, *node.args)]
        arguments += [f"{each.key}={self._value(each.value, scope)}" for each in node.kwargs]
        name = self._new()
        self._constants[name] = function
        return f"{name}({', '.join(arguments)})"

    def _line(self, depth: int, line: str) -> None:
        self._lines.append(" " * depth + line)

    def _new(self) -> str:
        self._num += 1
        return f"v{self._num}"


def _is_text(node: nodes.Node) -> bool:
    """Whether it is a string, if it is anything."""
    match node:
        case nodes.TemplateData() | nodes.Const(value=str()):
            return True
        case nodes.Add():
            return _is_text(node.left) or _is_text(node.right)
    return False


def _assigned(body: Sequence[nodes.Node]) -> Iterator[str]:
    """Names that are set in this scope, under conditions or not."""
    for node in body:
        match node:
            case nodes.Assign(target=nodes.Name(name=name)):
                yield name
            case nodes.If():
                yield from _assigned([*node.body, *node.elif_, *node.else_])
