"""LlamaIndex, by its class for servers that are like OpenAI's."""

from __future__ import annotations

import json
import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return f"It is sunny in {city}."


where = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"], "max_retries": 0}
llm = OpenAILike(model="demo", is_chat_model=True, is_function_calling_model=True, temperature=0, **where)
question = [ChatMessage(role="user", content="What is the capital of France?")]
answer = llm.chat_with_tools(
    [FunctionTool.from_defaults(get_weather)], user_msg="What is the weather in Paris?", tool_required=True
)
calls = llm.get_tool_calls_from_response(answer)
vector = OpenAILikeEmbedding(model_name="demo", **where).get_text_embedding("The fox")
print(
    json.dumps(
        {
            "whole": llm.chat(question).message.content,
            "streamed": "".join(chunk.delta or "" for chunk in llm.stream_chat(question)),
            "called": [[call.tool_name, *call.tool_kwargs] for call in calls[:1]],
            "vector": len(vector),
        }
    )
)
