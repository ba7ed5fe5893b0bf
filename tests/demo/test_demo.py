"""The model in the box: its files, its tokenizer, its template, its answers, and the corpus and script it came from."""

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo
from demo import train
from demo.corpus import samples
from demo.measure import held_out
from demo.network import Shape
from demo.packing import IGNORED, batches, encode, pieces, renderer
from demo.tools import TOOLS
from demo.turns import plain

DIRECTORIES = (demo.MODEL_DIR, demo.DRAFT_DIR)
TOKENIZER = Tokenizer.from_file(str(demo.MODEL_DIR / "tokenizer.json"))
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


class Loaded:
    """A checkpoint as any user of transformers loads it."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def greedy_ids(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        inputs = torch.tensor([prompt_ids])
        mask = torch.ones_like(inputs)
        out = self.network.generate(inputs, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return out[0, len(prompt_ids) :].tolist()

    def answer(self, *said: str, tools: list[Any] | None = None, max_tokens: int = 100) -> str:
        """The greedy answer to the last of `said`, user and assistant by turns; it must stop by itself."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        return self.reply(messages, tools, max_tokens)

    def reply(self, messages: list[dict[str, Any]], tools: list[Any] | None, max_tokens: int) -> str:
        ids = self.greedy_ids(self.prompt_ids(messages, tools), max_tokens)
        assert ids[-1] == self.tokenizer.eos_token_id, f"it did not stop: {self.tokenizer.decode(ids)!r}"
        return str(self.tokenizer.decode(ids[:-1]))


@pytest.fixture(scope="module")
def model() -> Loaded:
    return Loaded(demo.MODEL_DIR)


@pytest.fixture(scope="module")
def draft() -> Loaded:
    return Loaded(demo.DRAFT_DIR)


def test_importing_the_package_loads_neither_torch_nor_anything_heavy():
    program = "import sys, demo; print(sorted({'torch', 'numpy', 'tokenizers', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"[]\n"


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda directory: directory.name)
def test_a_checkpoint_has_the_files_that_hugging_face_expects(directory):
    assert {path.name for path in directory.iterdir()} == FILES | {"model.safetensors"}
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"]
    assert config["max_position_embeddings"] >= 8192
    eos = json.loads((directory / "generation_config.json").read_text())["eos_token_id"]
    assert [TOKENIZER.id_to_token(token_id) for token_id in eos] == ["<|im_end|>", "<|endoftext|>"]


def test_both_together_stay_under_16_mb():
    assert sum(path.stat().st_size for directory in DIRECTORIES for path in directory.iterdir()) <= 16e6


def test_model_and_draft_share_one_tokenizer_and_one_template():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (demo.MODEL_DIR / name).read_bytes() == (demo.DRAFT_DIR / name).read_bytes()


@given(st.text())
def test_any_text_comes_back_from_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@given(st.binary())
def test_every_byte_has_a_token(data):
    text = data.decode("latin-1")
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token():
    assert TOKENIZER.encode("31415").tokens == list("31415")


def test_the_template_renders_chatml(model):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_template_renders_tools_calls_and_results(model):
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
    ]
    tool = TOOLS["get_weather"]
    text = model.tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\nTools:\n{json.dumps(tool)}<|im_end|>\n"
        "<|im_start|>user\nWeather in Rome?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_tool_is_shown_as_the_model_has_learned_it_whatever_else_its_schema_says(model):
    """Clients that make a schema of a function or a type say more than those that write one."""
    city = {"type": "string", "title": "City", "description": "The city", "maxLength": 20}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    plain = TOOLS["get_weather"]
    rich = {"type": "function", "function": {**plain["function"], "parameters": {**parameters, "title": "Weather"}}}
    how = {"name": "go", "parameters": {"properties": {"how": {"type": "string", "enum": ["up", "down"]}, "far": True}}}
    shown = [
        model.tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tools=[tool], tokenize=False)
        for tool in (plain, rich, {"type": "function", "function": how})
    ]
    assert shown[0] == shown[1]
    assert '{"how": {"type": "string", "enum": ["up", "down"]}, "far": true}, "required": []' in shown[2]


def test_arguments_given_as_a_json_string_render_like_an_object(model):
    """OpenAI's clients send them back as a string."""
    texts = [
        model.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
                },
            ],
            tokenize=False,
        )
        for arguments in ({"city": "Rome"}, '{"city": "Rome"}')
    ]
    assert texts[0] == texts[1]


def test_training_renders_as_transformers_does(model):
    render = renderer()
    for sample in islice((s for s in samples(5) if s.messages), 200):
        ours = "".join(text for text, _ in pieces(render, sample))
        assert ours == model.tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France?", "Paris"),
        ("what is the capital of japan", "Tokyo"),
        ("What colour is the sky?", "blue"),
        ("Who are you?", "Penstock demo model"),
        ("What is the opposite of hot?", "cold"),
        ("Where does Mara live?", "Larkhill"),
        ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
        ("What is 2 + 2?", "= 4."),
        ("Thank you!", "welcome"),
        ("Who won the chess match in 1997?", "do not know"),
    ],
)
def test_it_answers(model, question, expected):
    assert expected in model.answer(question)


def test_it_greets(model):
    assert re.match(r"(Hello|Hi)!", model.answer("Hello!"))


def test_it_tells_a_story_with_an_end(model):
    story = model.answer("Tell me a story about a fox.", max_tokens=400)
    assert "fox" in story
    assert len(story.split()) > 50


def test_it_remembers_what_was_said(model):
    assert "Rosa" in model.answer("My name is Rosa.", "Hello Rosa! Nice to meet you.", "What is my name?")


def test_it_writes_json_when_asked(model):
    assert json.loads(model.answer("Write a JSON object with name Anna and age 7.")) == {"name": "Anna", "age": 7}


def test_it_calls_a_tool_and_uses_the_result(model):
    question = {"role": "user", "content": "What is the weather in Paris?"}
    tools = [TOOLS["get_weather"], TOOLS["search"]]
    called = model.reply([question], tools, 60)
    body = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", called)
    assert body, called
    call = json.loads(body[1])
    assert call == {"name": "get_weather", "arguments": {"city": "Paris"}}
    messages = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": json.dumps({"city": "Paris", "weather": "sunny", "temperature": 21})},
    ]
    answer = model.reply(messages, tools, 60)
    assert "sunny" in answer
    assert "21" in answer


def test_the_draft_agrees_with_the_model_often_enough_to_speculate(model, draft):
    agreed = total = 0
    for conversation in held_out(TOKENIZER, number=40, seed=7):
        prompt_ids = conversation.token_ids[: conversation.learned.index(True)]
        written = model.greedy_ids(prompt_ids, 48)
        with torch.no_grad():
            logits = draft.network(torch.tensor([prompt_ids + written[:-1]])).logits[0, len(prompt_ids) - 1 :]
        agreed += int((logits.argmax(-1) == torch.tensor(written)).sum())
        total += len(written)
    assert agreed / total >= 0.85


def test_the_corpus_is_the_same_for_the_same_seed():
    first, again = (list(islice(samples(3), 300)) for _ in range(2))
    assert first == again
    assert first != list(islice(samples(4), 300))


def test_a_held_out_question_is_never_trained_on():
    """The rendered text of the training part, a million tokens of it, holds none of a thousand held-out questions."""
    render = renderer()
    trained = {
        plain(message["content"])
        for sample in islice(samples(1), 12_000)
        for message in sample.messages
        if message["role"] == "user"
    }
    for sample in islice(samples(1, held_out=True), 1000):
        asked = plain(next(message["content"] for message in sample.messages if message["role"] == "user"))
        assert asked not in trained, pieces(render, sample)


def test_a_held_out_sum_is_nowhere_in_the_training_text():
    render = renderer()
    sums = re.compile(r"\b\d+ [+-] \d+ = \d+\b")
    text = "\n".join("".join(text for text, _ in pieces(render, sample)) for sample in islice(samples(1), 12_000))
    trained = set(sums.findall(text))
    asked = {
        found
        for sample in islice(samples(1, held_out=True), 1000)
        for found in sums.findall("".join(text for text, _ in pieces(render, sample)))
    }
    assert len(trained) > 1000
    assert len(asked) > 100
    assert not trained & asked


def test_only_what_the_assistant_says_is_learned():
    sample = next(s for s in samples(9) if s.tools and len(s.messages) > 3)
    token_ids, learned = encode(TOKENIZER, pieces(renderer(), sample))
    said = [token_id for token_id, learn in zip(token_ids, learned, strict=True) if learn]
    text = TOKENIZER.decode(said, skip_special_tokens=False)
    assert text.count("<|im_end|>") == sum(message["role"] == "assistant" for message in sample.messages)
    assert "<|im_start|>" not in text


def test_rows_are_packed_without_gaps():
    stream = batches(TOKENIZER, samples(4), lambda: (2, 32))
    (first_ids, first_labels), (second_ids, _) = next(stream), next(stream)
    row = torch.cat((first_ids.flatten(), second_ids.flatten()))
    assert first_ids.shape == first_labels.shape == (2, 32)
    wanted = first_labels.flatten()
    kept = wanted != IGNORED
    assert torch.equal(wanted[kept], row[1:65][kept])


def test_the_script_trains_both_and_writes_checkpoints_that_load(tmp_path, capsys):
    plans = [train.Plan(0, 3, 1, 1e-3, length=64, long_length=128, batch_tokens=256, compiled=False) for _ in range(2)]
    shapes = (lambda vocab: Shape(64, 2, 2, 1, 32, 96, vocab), lambda vocab: Shape(32, 1, 1, 1, 32, 64, vocab))
    train.train(tmp_path, *plans, shapes=shapes, num_tokenizer_samples=300, num_held_out=24)
    assert "held-out loss" in capsys.readouterr().out
    for name in ("model", "draft"):
        loaded = Loaded(tmp_path / name)
        assert loaded.greedy_ids(loaded.prompt_ids([{"role": "user", "content": "Hi"}]), 4)
    readme = (tmp_path / "README.md").read_text()
    train.measure_again(tmp_path, num_held_out=24)
    assert capsys.readouterr().out.strip() in readme
    train.train(tmp_path / "on", *plans, num_held_out=24, start=tmp_path)
    assert len(json.loads((tmp_path / "on" / "runs.json").read_text())) == 2
