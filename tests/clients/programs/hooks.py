"""Most generated requests name the model that there is, so that they come further than to its absence."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 4:
        return {**body, "model": "demo"}
    return body
