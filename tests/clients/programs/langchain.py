"""LangChain over OpenAI's API and over Anthropic's."""

from __future__ import annotations

import json
import os

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

QUESTION = "What is the capital of France?"


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
vectors = OpenAIEmbeddings(model="demo", check_embedding_ctx_length=False).embed_documents(["The fox", "The hen"])
print(
    json.dumps(
        {
            "whole": said(whole),
            "streamed": "".join(said(chunk) for chunk in chunks),
            "usage": chunks[-1].usage_metadata is not None or any(chunk.usage_metadata for chunk in chunks),
            "batch": [said(message) for message in batch],
            "anthropic": said(claude.invoke(QUESTION)),
            "vectors": [len(vector) for vector in vectors],
        }
    )
)
