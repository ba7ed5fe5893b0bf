"""What an answer of an upstream's is billed by: its own word, held against what was counted here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway import telemetry
from gateway.pieces import Counted
from gateway.upstreams.call import Call
from gateway.upstreams.reading import ToldUsage
from gateway.upstreams.server import Server
from policies.terms import Usage
from policies.upstreams.counting import Counts, estimated, verdict

if TYPE_CHECKING:
    from gateway.text import Text

log = logging.getLogger(__name__)


async def counted_of(
    call: Call, server: Server, text: Text | None, told: ToldUsage | None, said: Sequence[str]
) -> Counted:
    """``text``: the model's tokenizer, where there is one. ``told`` by the upstream; ``said``: all that it wrote, of
    each sequence."""
    asked = call.asked
    num_prompt, is_exact = len(call.request.prompt_token_ids), asked.is_exact and text is not None
    if is_exact and text is not None and said:
        num_completion = sum(map(len, await text.encode(said, with_specials=False, tenant_id=call.order.tenant_id)))
    else:
        num_completion = sum([estimated(len(each.encode("utf-8", "replace"))) for each in said])
    ours = Counts(num_prompt, num_completion)
    theirs = None if told is None else told.counts
    found = verdict(theirs, ours, is_exact, asked.max_prompt_tokens, asked.max_completion_tokens)
    if not found.agrees:
        server.num_disagreements += 1
        extra = telemetry.about_sent(call.request)
        log.info("upstream %s says %s, and %s were counted here", server.name, theirs, ours, extra=extra)
    if theirs is None:
        server.num_without_usage += 1
    if told is None or theirs is None or found.counted_by == "gateway":
        return Counted(Usage(num_prompt, 0, num_completion), "gateway")
    num_prompt, num_completion = theirs
    usage = Usage(num_prompt, told.num_cached_tokens, num_completion, told.num_reasoning_tokens)
    return Counted(usage, "upstream")
