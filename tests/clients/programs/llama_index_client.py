"""LlamaIndex, by its class for servers that are like OpenAI's."""

from __future__ import annotations

import json
import os

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

where = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "max_retries": 0}
llm = OpenAILike(model="demo", is_chat_model=True, temperature=0, **where)
question = [ChatMessage(role="user", content="What is the capital of France?")]
vector = OpenAILikeEmbedding(model_name="demo", **where).get_text_embedding("The fox")
print(
    json.dumps(
        {
            "whole": llm.chat(question).message.content,
            "streamed": "".join(chunk.delta or "" for chunk in llm.stream_chat(question)),
            "vector": len(vector),
        }
    )
)
