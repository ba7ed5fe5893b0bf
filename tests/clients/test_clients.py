"""The clients that people have, each against the real server, streaming and not."""

from __future__ import annotations

import pytest

SAYS = "The capital of France is Paris."
CALLED = ["get_weather", "city"]
"""A tool that is called, and what it is given."""


OFFICIAL = ["openai", "main"]
"""Where OpenAI's own package is in its newest version, and in the one that others here lean on."""


@pytest.mark.parametrize("run", [*OFFICIAL, "node"])
def test_the_official_client(clients, run):
    found = clients.node("openai_node.mjs") if run == "node" else clients.python("openai_sdk.py", run)
    assert found["whole"] == found["streamed"] == found["response"] == SAYS
    assert found["usage"]
    assert found["vector"] == 256
    if run != "node":
        assert found["typed"] == [True] * 4
        assert (found["called"], found["pieces"]) == (["Weather"] * 2, True)
        assert found["asynchronous"] == found["kept"] == SAYS
        assert found["models"] == ["demo"]
        assert found["in parts"] == ["completed", "validating"]
        assert (found["uploaded"], found["given up"]) == ("defabc", "cancelled")
        assert found["refused"] == ["AuthenticationError", "NotFoundError", "BadRequestError", "NotFoundError"]
        assert found["conversed"] == [SAYS] * 3
        assert found["kinds"] == [["message", role] for role in ("system", "user", "assistant", "user", "assistant")]
        assert found["short"] == ["message", "message", "compaction"]
        assert (found["behind"], found["deleted"]) == ("completed", [{"a": "b"}, True])
    else:
        assert found["refused"] == ["NotFoundError"]
        assert found["called"] == CALLED


def test_what_the_official_client_for_node_helps_with(clients):
    told = "user,assistant,tool,assistant"
    assert clients.node("openai_helpers.mjs") == {
        "helped": [SAYS, SAYS, 5, True],
        "handed": SAYS,
        "ran": [[told, True]] * 2,
        "typed": [True] * 5,
        "cut": "LengthFinishReasonError",
        "resumed": [True, SAYS],
        "aborted": [[True, True], [True, True], "APIUserAbortError"],
        "late": "APIConnectionTimeoutError",
        "retried": [SAYS, 400, 200],
        "conversed": "user,user,assistant",
        "vectors": [True] * 3,
        "batch": ["completed", [SAYS] * 3],
        "uploaded": "abcdef",
        "left": 0,
    }


@pytest.mark.parametrize("environment", OFFICIAL)
def test_the_official_client_over_a_websocket(clients, environment):
    assert clients.python("openai_socket.py", environment) == {
        "texts": ["", SAYS, SAYS],
        "behind": True,
        "called": ["get_weather", "completed"],
        "refused": ["error", "previous_response_not_found", "previous_response_id"],
        "lanes": {"a": SAYS, "b": SAYS},
        "no key": 401,
    }


def test_anthropics_client(clients):
    found = clients.python("anthropic_sdk.py")
    assert found["whole"] == found["streamed"] == SAYS
    assert found["usage"]
    assert found["counted"]
    assert (found["called"], found["pieces"]) == (["tool_use", *CALLED], True)
    assert "sunny" in found["told"]
    assert found["refused"] == ["AuthenticationError"]
    assert found["models"] == ["demo"]


def test_anthropics_client_for_node(clients):
    assert clients.node("anthropic_node.mjs") == {
        "whole": SAYS,
        "streamed": SAYS,
        "pieces": True,
        "usage": True,
        "counted": True,
        "kinds": ["tool_use", "text"],
        "typed": True,
        "aborted": "APIUserAbortError",
        "refused": ["NotFoundError", "not_found_error"],
    }


def test_the_ai_sdk(clients):
    found = clients.node("ai_sdk.mjs")
    assert (found.pop("vectors"), found.pop("refused")) == ([256] * 3, 404)
    assert set(found) == {"responses", "chat", "compatible", "messages"}
    for way, told in found.items():
        expected = {"texts": [SAYS] * 2, "usage": True, "called": [["Paris", True]] * 2, "typed": [True] * 2}
        assert told == {**expected, "ended": "abort"}, way


def test_langchain(clients):
    found = clients.python("langchain.py")
    assert {found["whole"], found["streamed"], found["anthropic"], *found["batch"]} == {SAYS}
    assert found["usage"]
    assert found["vectors"] == [256, 256]
    assert found["called"] == [["city"]] * 2
    assert (found["pieces"], found["typed"]) == (["city"], [True] * 2)


def test_llama_index(clients):
    found = clients.python("llama_index_client.py", "llama_index")
    assert found == {"whole": SAYS, "streamed": SAYS, "called": [CALLED], "vector": 256}


def test_litellm(clients):
    found = clients.python("litellm_client.py")
    called = [CALLED] * 2
    assert found == {"whole": SAYS, "streamed": SAYS, "called": called, "usage": True, "refused": ["NotFoundError"]}


def test_the_agents_sdk(clients):
    assert clients.python("openai_agents.py") == {
        "whole": SAYS,
        "streamed": SAYS,
        "chat": SAYS,
        "called": [True] * 2,
        "conversed": [SAYS, SAYS, ["user", "assistant"] * 2, SAYS, 3],
        "short": ["message", "compaction", "message", "message"],
    }


def test_pydantic_ai(clients):
    found = clients.python("pydantic_ai_agent.py")
    assert found == {"whole": SAYS, "streamed": SAYS, "typed": True, "called": True}


def test_instructor(clients):
    assert clients.python("instructor_client.py") == {"typed": [True, True]}


def test_the_llm_command(clients):
    assert clients.shell("llm_command.sh").splitlines() == [SAYS, SAYS]


def test_ollamas_client(clients):
    assert clients.python("ollama_client.py") == {
        "whole": SAYS,
        "streamed": SAYS,
        "called": [CALLED] * 2,
        "typed": True,
        "written": ["length", 5],
        "scored": [2] * 5,
        "vectors": [256, 256],
        "models": ["demo"],
        "capabilities": ["completion", "tools"],
        "refused": 404,
    }


def test_ollamas_client_for_node(clients):
    assert clients.node("ollama_node.mjs") == {
        "whole": SAYS,
        "streamed": SAYS,
        "typed": ["city"],
        "ended": [True, "AbortError"],
        "vectors": [256, 256],
        "unloaded": "unload",
        "models": ["demo"],
        "refused": 404,
    }
