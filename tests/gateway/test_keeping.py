"""What asks which requests are worth a trace, as far as it is asked of all of them."""

from __future__ import annotations

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.tracing.keeping import Keeping
from policies import settings
from tests.builders import an_entry

TIMES_MS = st.floats(0.0, 200.0)


@given(
    promised=st.tuples(TIMES_MS, TIMES_MS),
    slower_s=st.sampled_from([0.0, 0.01, 0.1]),
    duration_ms=TIMES_MS,
    first=st.none() | st.floats(0.0, 1.0),
    num_sequences=st.integers(0, 4),
    num_tokens=st.integers(0, 40),
)
@example(promised=(50.0, 10.0), slower_s=0.0, duration_ms=10.0, first=0.0, num_sequences=2, num_tokens=3)
def test_what_is_quick_is_kept_for_nothing(promised, slower_s, duration_ms, first, num_sequences, num_tokens):
    classes = {
        "standard": msgspec.structs.replace(settings.CLASSES["standard"], ttft_ms=promised[0], tpot_ms=promised[1])
    }
    keeping = Keeping(settings.Tracing(keep_slower_s=slower_s), classes, {})
    row = an_entry(
        sla_class="standard",
        status=200,
        duration_ms=duration_ms,
        ttft_ms=None if first is None else first * duration_ms,
        num_sequences=num_sequences,
        num_completion_tokens=num_tokens,
    )
    if duration_ms * (num_sequences or 1) <= keeping.quick_ms:
        assert keeping.became(row) == ""
