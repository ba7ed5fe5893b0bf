"""Chat templates: the conversation as one prompt, in Hugging Face's dialect of Jinja.

The dialect, as transformers' ``apply_chat_template`` documents it: a sandbox without side effects, trimmed blocks,
``break`` and ``continue``, the functions ``raise_exception`` and ``strftime_now``, ``tojson`` that leaves HTML and
Unicode alone, and ``{% generation %}`` blocks, which matter for training only. A template comes with a model that
someone downloaded, so what it may write is bounded, and whatever goes wrong in it is the request's failure, not ours.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text.straight import DICT_NAMES, straight

MAX_RENDERED_CHARS = 64 << 20
"""Four times the largest body that the default settings let in."""
MAX_RENDER_S = 5.0
"""Of a processor, for one conversation."""
BLOCKS_AT_ONCE = 256
"""So many blocks are rendered between two looks at the time."""
SHORT_ID_CHARS = 9

_LOOP_NAMES = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))


class TemplateFailure(Exception):
    """The template refused this conversation, or could not render it; the message is for the client."""


class TemplateInvalid(ValueError):
    """The template itself is not valid Jinja; the message names line and cause."""


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: marks what a model wrote, for training; here its content alone
    counts."""

    tags = {"generation"}  # noqa: RUF012 (Extension declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], content).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class _Context(Context):
    """One rendering, which takes no longer than it may."""

    num_blocks = 0
    ends_at = 0.0
    """By the thread's own clock; 0: it has only begun."""

    def enter(self) -> None:
        """A block begins: a turn of a loop, what is under a condition, or a macro. Raises TemplateFailure."""
        self.num_blocks += 1
        if self.num_blocks % BLOCKS_AT_ONCE == 0:
            now = time.thread_time()
            self.ends_at = self.ends_at or now + MAX_RENDER_S
            if now > self.ends_at:
                raise TemplateFailure("it takes too long")


class _Bounded(CodeGenerator):
    """Jinja's compiler, whose functions tell their context of each block."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Writes one."""
        self.writeline("context.enter()")
        super().blockvisit(nodes, frame)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products that would not fit into memory, and work without an end, on top of what the sandbox refuses by
    itself."""

    context_class = _Context
    code_generator_class = _Bounded
    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox's, by a shorter way for what templates read most: ``message.content`` and ``loop.first``."""
        kind = type(obj)
        if kind is dict and attribute not in DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for a, b in ((left, right), (right, left)):
            if isinstance(a, str | list | tuple) and isinstance(b, int) and len(a) * b > MAX_RENDERED_CHARS:
                raise SecurityError("the product is too long")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: object) -> None:
    raise TemplateFailure(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], autoescape=False)
_environment.filters["tojson"] = _tojson
_environment.globals["raise_exception"] = _raise_exception
_environment.globals["strftime_now"] = _strftime_now


class ChatTemplate:
    """One template, compiled once. ``variables`` are those that every conversation sees, such as ``bos_token``."""

    def __init__(self, source: str, variables: Mapping[str, object]) -> None:
        try:
            tree = _environment.parse(source)
            self._template = _environment.from_string(source, globals=dict(variables))
            # A rendering copies these, and a plain dict copies faster than the chain of two that Jinja makes.
            self._template.globals = dict(self._template.globals)
            self._straight = straight(tree, _environment, self._template.globals)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateInvalid(f"the chat template is not valid: line {error.lineno}: {error.message}") from None
        except Exception as error:  # what is too deep, or too long, for Jinja or for Python
            raise TemplateInvalid(f"the chat template cannot be compiled: {str(error)[:200]}") from None
        self.source = source
        # Templates written before the role existed would refuse it, or drop the message in silence.
        self.knows_developer = "developer" in source
        self.knows_thinking = re.search(r"""\.thinking\b|["']thinking["'](\]|\s+in\b)""", source) is not None
        """What a message's reasoning is to gpt-oss."""
        self._wants_short_ids = re.search(r"\bid\s*\|\s*length\s*(!=|<)\s*9\b", source) is not None

    @cached_property
    def knows_system(self) -> bool:
        """What a system says is neither refused nor left out."""
        said = [{"role": "system", "content": "0123456789"}, {"role": "user", "content": "-"}]
        try:
            return "0123456789" in self.render(said, None, {})
        except TemplateFailure:
            return False

    def id_of(self, call_id: str) -> str:
        """A call's id as the template takes it: Mistral's want nine letters and digits, whoever gave it."""
        if not self._wants_short_ids or (len(call_id) == SHORT_ID_CHARS and call_id.isalnum()):
            return call_id
        return blake2b(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT_ID_CHARS]

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        switches: Mapping[str, object],
    ) -> str:
        """The prompt. ``switches`` are variables of the template's own. Raises TemplateFailure."""
        variables = {"add_generation_prompt": True, **switches, "messages": messages, "tools": tools}
        if self._straight is not None:
            try:
                prompt = self._straight(variables)
            except Exception:  # what is wrong, if anything is, Jinja says
                pass
            else:
                if len(prompt) <= MAX_RENDERED_CHARS:
                    return prompt
        return self._by_jinja(variables)

    def _by_jinja(self, variables: dict[str, object]) -> str:
        pieces, num_chars = [], 0
        try:
            # What Template.generate does, without its second generator around each piece.
            for piece in self._template.root_render_func(self._template.new_context(variables)):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise TemplateFailure("the rendered conversation is too long")
        except TemplateFailure as failure:
            raise TemplateFailure(f"The model's chat template refused the messages: {failure}") from None
        except Exception as error:  # whatever a template does wrong
            raise TemplateFailure(f"The model's chat template cannot render these messages: {error}") from None
        return "".join(pieces)
