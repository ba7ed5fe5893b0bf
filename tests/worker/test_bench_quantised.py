"""The benchmark of what few bits cost: as it measures, on a little of what it measures."""

from __future__ import annotations

from benchmarks import quantised
from demo import MODEL_DIR


def test_a_form_diverges_from_bfloat16_and_bfloat16_from_itself_does_not():
    texts = quantised.conversations(2)
    found = {
        name: quantised.divergence(str(MODEL_DIR), texts, quantised.FORMS[name], "cpu")
        for name in ("bfloat16", "int8", "int4, weights alone")
    }
    assert len(found["int8"].nats) == sum(len(text.token_ids) for text in texts)
    assert found["bfloat16"].nats.abs().max() == 0.0
    assert 0.0 < found["int8"].nats.mean() < found["int4, weights alone"].nats.mean()


def test_each_kind_of_device_has_the_forms_that_it_multiplies():
    assert quantised.forms_on("cpu", "demo").keys() == quantised.FORMS.keys()
    assert "fp8, weights alone" not in quantised.forms_on("cpu", "M")
    assert {"fp8", "fp8, weights alone", "bfloat16, KV in fp8"} <= quantised.forms_on("cuda", "M").keys()
