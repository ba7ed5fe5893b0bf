"""Vectors and scores over HTTP: real workers with encoders made on the spot beside the demo model, OpenAI's own client,
and what transformers says of the same texts."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode

import openai
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

import demo
from gateway.flights import MAX_AT_ONCE
from policies import settings
from tests import house as houses
from tests.builders import until

WORDS = [
    "what",
    "is",
    "the",
    "capital",
    "of",
    "france",
    "paris",
    "rome",
    "a",
    "city",
    "dog",
    "cat",
    "runs",
    "in",
    "spring",
    "and",
    "sleeps",
    "all",
    "winter",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = ["what is the capital of france", "paris is the capital", "a dog runs", "a cat sleeps all winter in rome"]
ENGINE = settings.Engine(device="cpu", dtype="float32", num_threads=1, max_kv_bytes=32 << 20)


class Files:
    """A BERT for vectors and one that scores pairs, with their tokenizer."""

    def __init__(self, directory):
        # Beside workers that compute too, several threads of so little would only wait for each other.
        torch.set_num_threads(1)
        self.places = {"reader": directory / "reader", "judge": directory / "judge"}
        sizes = {
            "vocab_size": len(SPECIAL) + len(WORDS),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        }
        torch.manual_seed(5)
        self.reader = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
        config = transformers.BertConfig(**sizes, num_labels=1)
        self.judge = transformers.BertForSequenceClassification(config).eval()
        for model in (self.reader, self.judge):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
        vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
        self.tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        self.tokenizer.add_special_tokens(SPECIAL)
        for name, model in (("reader", self.reader), ("judge", self.judge)):
            model.save_pretrained(self.places[name])
            self.tokenizer.save(str(self.places[name] / "tokenizer.json"))
        pooling = {"pooling_mode_mean_tokens": True}
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in paths.items()]
        (self.places["reader"] / "modules.json").write_text(json.dumps(modules))
        (self.places["reader"] / "1_Pooling").mkdir()
        (self.places["reader"] / "1_Pooling" / "config.json").write_text(json.dumps(pooling))

    @torch.inference_mode()
    def vector(self, text, num_dimensions=32):
        ids = self.tokenizer.encode(text).ids
        mean = self.reader(torch.tensor([ids])).last_hidden_state[0].mean(0)[:num_dimensions]
        return mean / mean.norm()

    @torch.inference_mode()
    def score(self, first, second):
        encoding = self.tokenizer.encode(first, second)
        logits = self.judge(torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])).logits
        return float(logits[0, 0].sigmoid())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="module")
def readers(files, tmp_path_factory):
    sources = {"demo": "demo", **{name: str(place) for name, place in files.places.items()}}
    served = {name: settings.Model(source=source, engine=ENGINE) for name, source in sources.items()}
    with houses.running(tmp_path_factory.mktemp("readers"), models=served) as house:
        yield house


@pytest.fixture
async def client(readers):
    for model in readers.config.models:
        await until(lambda model=model: readers.gw.dispatch.ready(model) is not None)
    async with readers.client() as client:
        yield client


async def post(house, path, status=200, **body):
    async with house.http() as session, session.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
        return answer


async def test_vectors_are_those_of_transformers(client, files):
    answer = await client.embeddings.create(model="reader", input=TEXTS)  # as base64, which the client decodes
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    for each, text in zip(answer.data, TEXTS, strict=True):
        torch.testing.assert_close(torch.tensor(each.embedding), files.vector(text), rtol=1e-4, atol=1e-4)
    num_tokens = sum(len(files.tokenizer.encode(text).ids) for text in TEXTS)
    assert answer.usage.model_dump() == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer.object, answer.model) == ("list", "reader")


async def test_a_vector_comes_as_numbers_or_as_their_bytes_and_is_cut_where_asked(readers, client, files):
    numbers = await post(readers, "/v1/embeddings", model="reader", input=TEXTS[0], dimensions=10)
    vector = numbers["data"][0]["embedding"]
    torch.testing.assert_close(torch.tensor(vector), files.vector(TEXTS[0], 10), rtol=1e-4, atol=1e-4)
    packed = await post(
        readers, "/v1/embeddings", model="reader", input=TEXTS[0], dimensions=10, encoding_format="base64"
    )
    assert array("f", b64decode(packed["data"][0]["embedding"])).tolist() == vector


async def test_token_ids_are_taken_as_they_are(client, files):
    ids = [files.tokenizer.encode(text).ids for text in TEXTS]
    by_text = await client.embeddings.create(model="reader", input=TEXTS)
    by_ids = await client.embeddings.create(model="reader", input=ids)
    one = await client.embeddings.create(model="reader", input=ids[0])
    assert [each.embedding for each in by_ids.data] == [each.embedding for each in by_text.data]
    torch.testing.assert_close(
        torch.tensor(one.data[0].embedding), torch.tensor(by_text.data[0].embedding), rtol=1e-4, atol=1e-5
    )


async def test_more_texts_than_are_computed_at_a_time_have_their_vectors_in_order(client, files):
    texts = [" ".join(WORDS[n % 7 : n % 11 + 8]) for n in range(3 * MAX_AT_ONCE)]
    answer = await client.embeddings.create(model="reader", input=texts)
    for each, text in zip(answer.data, texts, strict=True):
        torch.testing.assert_close(torch.tensor(each.embedding), files.vector(text), rtol=1e-4, atol=1e-4)


async def test_a_model_that_writes_gives_vectors_too(client):
    answer = await client.embeddings.create(model="demo", input=["The fox", "The fox ran over the hill."])
    model = transformers.AutoModelForCausalLM.from_pretrained(str(demo.MODEL_DIR), dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(demo.MODEL_DIR))
    for each, text in zip(answer.data, ("The fox", "The fox ran over the hill."), strict=True):
        with torch.inference_mode():
            ids = torch.tensor([tokenizer(text).input_ids])
            last = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        torch.testing.assert_close(torch.tensor(each.embedding), last / last.norm(), rtol=1e-3, atol=1e-4)


async def test_documents_are_ranked_by_the_head_of_a_cross_encoder(readers, client, files):
    body = {"model": "judge", "query": TEXTS[0], "documents": [*TEXTS[1:], {"text": "paris"}], "top_n": 3}
    answer = await post(readers, "/v1/rerank", **body)
    scores = [files.score(TEXTS[0], text) for text in (*TEXTS[1:], "paris")]
    order = sorted(range(4), key=lambda index: -scores[index])[:3]
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], rel=1e-3)
        assert each["document"]["text"] == [*TEXTS[1:], "paris"][each["index"]]
    bare = await post(readers, "/rerank", **body, return_documents=False)
    assert [each.keys() for each in bare["results"]] == [{"index", "relevance_score"}] * 3


async def test_only_the_beginning_of_a_long_document_is_read_where_that_is_asked_for(readers, client, files):
    long = " ".join(WORDS * 9)
    body = {"model": "judge", "query": "paris", "documents": [long, "rome"]}
    refused = await post(readers, "/v1/rerank", 400, **body)
    assert refused["error"]["code"] == "context_length_exceeded"
    assert refused["error"]["param"] == "documents"
    answer = await post(readers, "/v2/rerank", **body, max_tokens_per_doc=6)
    (score,) = [each["relevance_score"] for each in answer["results"] if each["index"] == 0]
    assert score == pytest.approx(files.score("paris", " ".join(WORDS[:6])), rel=1e-3)


async def test_of_a_long_pair_the_beginning_is_read_where_that_is_asked_for(readers, client, files):
    long = " ".join(WORDS * 9)
    body = {"model": "judge", "query": "paris", "documents": [long, "rome"]}
    for num_tokens in (6, 9, -1):
        answer = await post(readers, "/v1/rerank", **body, truncate_prompt_tokens=num_tokens)
        most = 64 if num_tokens < 0 else num_tokens
        words = (WORDS * 9)[: most - 4]  # beside the query, and three tokens that hold the two apart
        scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert scores[0] == pytest.approx(files.score("paris", " ".join(words)), rel=1e-3)
        assert scores[1] == pytest.approx(files.score("paris", "rome"), rel=1e-3)
        pairs = {"text_1": "paris", "text_2": [long, "rome"]}
        told = await post(readers, "/v1/score", model="judge", truncate_prompt_tokens=num_tokens, **pairs)
        assert [each["score"] for each in told["data"]] == [scores[0], scores[1]]
        assert told["usage"]["prompt_tokens"] == most + 5
    body["model"] = "reader"  # its vectors are compared
    answer = await post(readers, "/v1/rerank", **body, truncate_prompt_tokens=-1)
    assert answer["usage"]["total_tokens"] == 64 + 3 + 3
    assert (
        "truncate_prompt_tokens"
        in (await post(readers, "/v1/rerank", 400, **body, truncate_prompt_tokens=0))["error"]["message"]
    )


async def test_of_a_long_text_the_beginning_is_read_where_that_is_asked_for(readers, client, files):
    long = " ".join(WORDS * 9)
    body = {"model": "reader", "input": [long, TEXTS[0]]}
    refused = await post(readers, "/v1/embeddings", 400, **body)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("context_length_exceeded", "input")
    for num_tokens in (2, 3, 9, -1):
        answer = await post(readers, "/v1/embeddings", **body, truncate_prompt_tokens=num_tokens)
        most = 64 if num_tokens < 0 else num_tokens
        for each, words in zip(answer["data"], (WORDS * 9, TEXTS[0].split()), strict=True):
            expected = files.vector(" ".join(words[: most - 2]))  # between the first token and the last
            torch.testing.assert_close(torch.tensor(each["embedding"]), expected, rtol=1e-4, atol=1e-4)
    ollamas = await post(readers, "/api/embed", **body)
    assert ollamas["embeddings"] == [each["embedding"] for each in answer["data"]]
    assert ollamas["prompt_eval_count"] == answer["usage"]["prompt_tokens"] == 64 + len(TEXTS[0].split()) + 2
    assert "maximum context length" in (await post(readers, "/api/embed", 400, **body, truncate=False))["error"]
    ids = await post(readers, "/v1/embeddings", model="reader", input=[[4] * 100], truncate_prompt_tokens=-1)
    assert ids["usage"]["prompt_tokens"] == 64


async def test_the_text_that_is_empty_is_the_one_that_is_named(readers, client):
    for path, body, param in (
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": [""]}, "documents"),
        ("/v1/score", {"queries": [""], "items": ["a"]}, "queries"),
    ):
        assert (await post(readers, path, 400, model="demo", **body))["error"]["param"] == param, path


async def test_pairs_are_scored_by_the_cosine_where_a_model_has_no_head(readers, client, files):
    answer = await post(readers, "/v1/score", model="reader", text_1=TEXTS[0], text_2=TEXTS)
    wanted = [float(files.vector(TEXTS[0]) @ files.vector(text)) for text in TEXTS]
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=1e-4)
    assert wanted[0] == pytest.approx(1.0)
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        named = dict(zip(names, (TEXTS[0], TEXTS), strict=True))
        assert (await post(readers, "/v1/score", model="reader", **named))["data"] == answer["data"]
    beside = await post(readers, "/score", model="judge", text_1=TEXTS[:2], text_2=TEXTS[2:])
    wanted = [files.score(*pair) for pair in zip(TEXTS[:2], TEXTS[2:], strict=True)]
    assert [each["score"] for each in beside["data"]] == pytest.approx(wanted, rel=1e-3)


async def test_what_was_read_is_in_the_ledger_and_nothing_was_written(readers, client):
    before = len(await readers.ledger_rows(endpoint="/v1/embeddings"))
    answer = await client.embeddings.create(model="reader", input=TEXTS, user="somebody")
    await readers.quiet()
    rows = await readers.ledger_rows(endpoint="/v1/embeddings")
    assert len(rows) == before + 1
    (row,) = [row for row in rows if row.end_user == "somebody"]
    assert (row.status, row.model, row.num_prompt_tokens) == (200, "reader", answer.usage.prompt_tokens)
    assert (row.num_completion_tokens, row.num_sequences, row.finish_reason) == (0, 4, "stop")
    assert row.engine_us > 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"model": "reader", "input": ""}, "input"),
        ("/v1/embeddings", {"model": "reader", "input": []}, "input"),
        ("/v1/embeddings", {"model": "reader", "input": ["a", 3]}, "input"),
        ("/v1/embeddings", {"model": "reader", "input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"model": "reader", "input": [99]}, "input"),
        ("/v1/embeddings", {"model": "reader", "input": "dog " * 99}, "input"),
        ("/v1/embeddings", {"model": "reader", "input": "a", "dimensions": 33}, "dimensions"),
        ("/v1/embeddings", {"model": "reader", "input": "a", "encoding_format": "f16"}, "encoding_format"),
        ("/v1/rerank", {"model": "judge", "query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"model": "judge", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"model": "judge", "query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/score", {"model": "judge", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/completions", {"model": "reader", "prompt": "a"}, "model"),
    ],
)
async def test_what_cannot_be_done_is_named(readers, client, path, body, param):
    refused = await post(readers, path, 400, **body)
    assert refused["error"]["type"] == "invalid_request_error"
    assert refused["error"]["param"] == param


async def test_a_model_that_is_not_there_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="nobody", input="a")
