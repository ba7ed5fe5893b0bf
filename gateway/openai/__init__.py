"""Requests, responses, chunks and errors in OpenAI's shapes: what they say on the wire, not what is done about them.

Where the shapes were read: openai-python's ``src/openai/types``, and for the sampling extras vLLM's ``protocol.py``.
"""

from gateway.openai.failures import ErrorBody, ErrorDetail, Malformed

__all__ = ["ErrorBody", "ErrorDetail", "Malformed"]
