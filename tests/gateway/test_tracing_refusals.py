"""What a trace tells of a request that was understood and refused."""

from __future__ import annotations

from policies import settings
from policies.policy import Limits, Policy
from tests.gateway.conftest import HELLO


async def test_a_request_that_its_tenant_s_limit_refuses_says_whose_it_was_and_for_what(open_front, collector):
    tracing = settings.Tracing(endpoint=collector.endpoint, protocol="http/protobuf", sample_ratio=0.0)
    policy = Policy(limits=Limits(tokens_per_minute=1))
    async with open_front(tracing=tracing, policies={"default": policy}) as front:
        (tenant,) = front.gw.directory.tenants()
        body = {"model": "demo", "messages": HELLO, "seed": 7}
        status, _, headers = await front.post("/v1/chat/completions", body)
        assert status == 429
        whole, *below = await collector.trace(headers["x-trace-id"])
        assert (whole.name, below[-1].name) == ("chat demo", "admit")
        told = {
            "error.type": "rate_limit_exceeded",
            "penstock.tenant.id": tenant.id,
            "gen_ai.request.model": "demo",
            "gen_ai.request.seed": 7,
        }
        assert whole.attributes.items() >= told.items()
        assert not {"gen_ai.response.model", "gen_ai.usage.output_tokens"} & whole.attributes.keys()
        assert not front.rows()
