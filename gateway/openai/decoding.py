"""JSON to typed Structs; what is wrong with it is said as OpenAI would, with the path of the part at fault."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gateway.openai.duplicate_keys import check_keys, count_quotes
from gateway.openai.failures import Malformed
from policies.choices import told_choices

T = TypeVar("T")


def decoded(decoder: msgspec.json.Decoder[T], body: bytes, least: Callable[[T], int] | None = None) -> T:
    """What is in ``body``. ``least``: strings, keys and values together, that its body has at least; where it has no
    more than that, no key is there twice. Raises Malformed."""
    try:
        num_quotes = count_quotes(body)
        value = decoder.decode(body)
        if least is None or 2 * least(value) != num_quotes:
            check_keys(body, num_quotes)
        return value
    except msgspec.ValidationError as error:
        raise _named(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(f"The body could not be read as JSON: {_why(body, error)}", code="invalid_json") from None
    except RecursionError:
        raise Malformed("The body could not be read as JSON: it is nested too deeply", code="invalid_json") from None


_HALF_AT_END = re.compile(rb"(?s)\\u[dD][89abAB][0-9a-fA-F]{2}[^\\].{0,4}\Z")


def _why(body: bytes, error: Exception) -> str:
    """In clearer words where ``error`` takes the other half of a surrogate pair for cut off."""
    if not body.strip():
        return "it is empty"
    if "truncated" in str(error) and _HALF_AT_END.search(body):
        return "there is half of a character in it (a lone surrogate)"
    return str(error)


def converted(value: Any, type_: type[T], path: str, strict: bool = True) -> T:
    """A part of a body that was decoded before, at ``path`` of it. Not ``strict``: text may stand for numbers, as it
    does in queries and forms. Raises Malformed."""
    try:
        return msgspec.convert(value, type_, strict=strict)
    except msgspec.ValidationError as error:
        raise _named(str(error), type_, path) from None


_AT = re.compile(r"(?s)(.*?)(?: - at `(key` in `)?\$\.?(.*)`)?")
_CODES = (
    (r"Expected `int` >=", "integer_below_min_value"),
    (r"Expected `int` <=|Integer value out of range", "integer_above_max_value"),
    (r"Expected `float` >=?", "decimal_below_min_value"),
    (r"Expected `float` <=?|Number out of range", "decimal_above_max_value"),
    (r"Expected `array` of length >= 1", "empty_array"),
    (r"Expected `array` of length >=", "array_below_min_length"),
    (r"Expected `array` of length <=", "array_above_max_length"),
    (r"Expected `object` of length <=", "object_above_max_properties"),
    (r"Expected `str` of length >= 1", "empty_string"),
    (r"Expected `str` of length <=", "string_above_max_length"),
    (r"Invalid enum value|Expected `str` matching", "invalid_value"),
    (r"Expected `", "invalid_type"),
)


def plain(what: str) -> str:
    """msgspec's words without its quotes; a pattern as it is, but for the end by which ``$`` is only the text's."""
    if " matching regex " in what:
        what = re.sub(r"\(\?![^()]*\)'$", "'", what).replace("\\\\", "\\")
    return what.replace("`", "")


def _named(error: str, type_: Any, root: str = "") -> Malformed:
    """msgspec's "Expected `int`, got `str` - at `$.n`" as OpenAI would say it, with ``param`` and ``code``. ``type_``:
    of what is at ``root``."""
    found = _AT.fullmatch(error)
    assert found is not None
    what, path = found[1], (found[3] or "").removesuffix("[...]")
    path = f"{root}.{path}" if root and path and not path.startswith("[") else root + path
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return Malformed(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    code = next((code for pattern, code in _CODES if re.match(pattern, what)), None)
    what = plain(told_choices(what, type_, found[3] or "", bool(found[2]))).replace("Expected", "expected", 1)
    if not path:
        return Malformed(f"Invalid body: {what}.", None, code)
    return Malformed(f"Invalid '{path}': {what}.", path, code)
