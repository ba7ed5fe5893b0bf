"""LangChain over OpenAI's API and over Anthropic's."""

from __future__ import annotations

import json
import os
from functools import reduce
from operator import add

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    city: str = Field(max_length=12)


@tool(args_schema=City)
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return f"It is sunny in {city}."


def said(message: object) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


chat = ChatOpenAI(model="demo", temperature=0, max_retries=0, stream_usage=True)
whole = chat.invoke(QUESTION)
chunks = list(chat.stream(QUESTION))
batch = chat.batch([QUESTION, QUESTION])
claude = ChatAnthropic(
    model="demo", temperature=0, max_tokens=40, max_retries=0, base_url=os.environ["ANTHROPIC_BASE_URL"]
)
calls = [
    model.bind_tools([get_weather], tool_choice="any").invoke("What is the weather in Paris?").tool_calls
    for model in (chat, claude)
]
pieces = reduce(add, chat.bind_tools([get_weather], tool_choice="any").stream("What is the weather in Paris?"))
typed = [
    chat.with_structured_output(City, method=method).invoke("Name a city.")
    for method in ("json_schema", "function_calling")
]
vectors = OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False).embed_documents(["The fox", "The hen"])
print(
    json.dumps(
        {
            "whole": said(whole),
            "streamed": "".join(said(chunk) for chunk in chunks),
            "usage": chunks[-1].usage_metadata is not None or any(chunk.usage_metadata for chunk in chunks),
            "batch": [said(message) for message in batch],
            "anthropic": said(claude.invoke(QUESTION)),
            "called": [sorted(call["args"]) for found in calls for call in found[:1]],
            "pieces": sorted(pieces.tool_calls[0]["args"]),
            "typed": [isinstance(each, City) for each in typed],
            "vectors": [len(vector) for vector in vectors],
        }
    )
)
