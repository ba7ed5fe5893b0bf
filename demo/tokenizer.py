"""The tokenizer: byte-level BPE, one token for each digit, ChatML with Hermes tool calls.

Every byte has a token, so any text can be encoded and comes back unchanged; nothing is normalised.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not special: a client that asks for plain text sees the tool calls, as with the Hermes and Qwen models.
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Words with the space before them, single digits, runs of marks, and white space: the pattern of Qwen2.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or system %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{{- ('\\n\\n' if system else '') + 'Tools:' }}
{%- for tool in tools %}
{%- set function = tool.function %}
{%- set parameters = function.parameters or {} %}
{{- '\\n{"type": "function", "function": {"name": ' + (function.name | tojson) }}
{{- ', "description": ' + (function.description | tojson) if function.description else '' }}
{{- ', "parameters": {"type": "object", "properties": {' }}
{%- for name, value in (parameters.properties or {}) | items %}
{{- ('' if loop.first else ', ') + (name | tojson) + ': ' }}
{%- set is_named = value is mapping and value.type is string %}
{%- if is_named and not ('enum' in value or 'properties' in value or 'items' in value) %}
{{- '{"type": ' + (value.type | tojson) + '}' }}
{%- else %}
{{- value | tojson }}
{%- endif %}
{%- endfor %}
{{- '}, "required": ' + ((parameters.required or []) | tojson) + '}}}' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}
{%- if not loop.previtem or loop.previtem.role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function or call %}
{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{"name": ' + (function.name | tojson) }}
{{- ', "arguments": ' }}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TOOL_MARKS),
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must be there."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"the tokenizer lacks {token}"
    return found


def save(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": [],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
