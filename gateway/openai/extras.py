"""What vLLM and SGLang take beside OpenAI's fields and this server does not do: refused by name where it would change
the answer.

What would change nothing is tolerated, as fields are that nobody knows: ``request_id``, ``session_id``, ``rid``,
``stream_interval``, ``length_penalty`` (of beams), ``spaces_between_special_tokens`` (no special ones are told),
``truncation_side`` (of a prompt that is not cut), ``mm_processor_kwargs`` and ``media_io_kwargs`` (there is text
alone), ``guided_decoding_backend``.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from gateway.openai.failures import Malformed

REFUSED = "Refused by name (`unsupported_parameter`), unless it asks for what is done anyway."
"""What /openapi.json says of each."""
Unserved = Annotated[Any, msgspec.Meta(description=REFUSED)]


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """Of what is answered in words. null is as if it was not there."""

    add_generation_prompt: Unserved = None
    custom_logit_processor: Unserved = None
    documents: Unserved = None
    guided_whitespace_pattern: Unserved = None
    input_ids: Unserved = None
    logits_processors: Unserved = None
    logprob_token_ids: Unserved = None
    lora_path: Unserved = None
    priority: Unserved = None
    prompt_embeds: Unserved = None
    prompt_logprobs: Unserved = None
    repetition_detection: Unserved = None
    return_hidden_states: Unserved = None
    return_prompt_text: Unserved = None
    return_token_ids: Unserved = None
    return_tokens_as_token_ids: Unserved = None
    separate_reasoning: Unserved = None
    session_params: Unserved = None
    skip_special_tokens: Unserved = None
    stop_regex: Unserved = None
    thinking_token_budget: Unserved = None
    truncate_prompt_tokens: Unserved = None
    use_beam_search: Unserved = None
    vllm_xargs: Unserved = None
    watermarking: Unserved = None


class ReadingExtras(msgspec.Struct, frozen=True, kw_only=True):
    """Of what is answered in numbers."""

    add_special_tokens: Unserved = None
    embed_dtype: Unserved = None
    endianness: Unserved = None
    normalize: Unserved = None
    padding: Unserved = None
    priority: Unserved = None
    truncation_side: Unserved = None
    use_activation: Unserved = None


EXTRAS = Extras.__struct_fields__
_SERVED: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "documents": ([],),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "logits_processors": ([],),
    "normalize": (True,),
    "padding": ("do_not_pad",),
    "priority": (0,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("right",),
    "use_activation": (True,),
    "vllm_xargs": ({},),
}
"""What they may say, as that is how it is here anyway; those that are not here: false."""
_INSTEAD: Mapping[str, str] = {
    "documents": "'chat_template_kwargs' hands them to templates that know them",
    "lora_path": "an adapter is asked for as a 'model'",
    "priority": "'service_tier' says how soon it is needed",
    "prompt_logprobs": "'echo' with 'logprobs' tells them of a completion's prompt",
    "truncate_prompt_tokens": "a prompt is read whole or not at all",
}
_READ, _NUM_READ = attrgetter(*EXTRAS), len(EXTRAS)


def check_extras(call: Extras | ReadingExtras) -> None:
    """Raises Malformed."""
    if isinstance(call, Extras) and _READ(call).count(None) == _NUM_READ:
        return  # as nearly always
    for name in EXTRAS if isinstance(call, Extras) else ReadingExtras.__struct_fields__:
        value, served = getattr(call, name), _SERVED.get(name)
        if value is not None and (value is not False if served is None else value not in served):
            raise refused(name, _INSTEAD.get(name, ""))


def refused(param: str, instead: str = "") -> Malformed:
    """What is not done here."""
    but = f"; {instead}" if instead else ""
    return Malformed(f"'{param}' is not supported by this server{but}", param, "unsupported_parameter")
