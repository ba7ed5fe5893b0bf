"""FOCUS 1.2, the FinOps Foundation's billing format: a row for each line of costs.

All columns of the specification are there; those of things that are not sold here (regions, commitments, capacity
reservations) are null, and so is the invoice, which somebody else writes. The columns that begin with ``x_`` are ours.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from decimal import Decimal

import msgspec

from gateway.exports import day_of
from gateway.exports.columns import Column, Row, Type, Value, money
from gateway.exports.costs import UNITS, Line
from gateway.exports.names import Names
from policies.pricing import PARTS, Kind

PROVIDER = "Penstock"
MILLION = 1_000_000
METERS: dict[Kind, tuple[str, str | None]] = {
    "prompt": ("Input Tokens", "Input"),
    "cached_prompt": ("Cache Read Input Tokens", "CacheRead"),
    "completion": ("Output Tokens", "Output"),
    "reasoning": ("Reasoning Output Tokens", "Output"),
    "cache_hit": ("Exact Cache Tokens", "CacheRead"),
    "request": ("Requests", None),
    "engine_second": ("Engine Seconds", None),
}
"""SkuMeter, and the TokenType of SkuPriceDetails."""

_TYPES: dict[str, Type] = {
    **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), "money"),
    **dict.fromkeys(("ConsumedQuantity", "PricingQuantity", "CommitmentDiscountQuantity"), "number"),
    **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), "price"),
    **dict.fromkeys(("PricingCurrencyContractedUnitPrice", "PricingCurrencyListUnitPrice"), "price"),
    "PricingCurrencyEffectiveCost": "money",
    **dict.fromkeys(
        ("BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart"),
        "instant",
    ),
    "x_NumRequests": "count",
}
_NAMES = (
    "AvailabilityZone",
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingAccountType",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "CapacityReservationId",
    "CapacityReservationStatus",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountQuantity",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "CommitmentDiscountUnit",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "InvoiceId",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingCategory",
    "PricingCurrency",
    "PricingCurrencyContractedUnitPrice",
    "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "RegionId",
    "RegionName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "ServiceSubcategory",
    "SkuId",
    "SkuMeter",
    "SkuPriceDetails",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
    "Tags",
    "x_NumRequests",
    "x_PriceVersion",
    "x_SlaClass",
)
COLUMNS = tuple(Column(name, _TYPES.get(name, "text")) for name in _NAMES)


def rows_of(lines: Iterable[Line], names: Names, currency: str) -> list[Row]:
    """In the same order."""
    rows = []
    for line in lines:
        values = _values(line, names, currency)
        assert values.keys() <= set(_NAMES)
        rows.append(tuple(values.get(name) for name in _NAMES))
    return rows


def _values(line: Line, names: Names, currency: str) -> dict[str, Value]:
    """Those that are not null."""
    group, kind = line.group, line.kind
    meter, token_type = METERS[kind]
    unit, _ = UNITS[kind]
    is_token = unit == "Tokens"
    # Tokens are priced by the million; a rate is of one token, one request, or a microsecond.
    per_unit = Decimal(1) if is_token or kind == "engine_second" else Decimal(1).scaleb(-6)
    unit_price, list_unit_price = (_price(rate) * per_unit for rate in (line.rate, line.list_rate))
    model = group.model.encode("ascii", "backslashreplace").decode()  # all of these are ASCII in FOCUS
    sku = f"{model}/{kind}"
    price_version = group.price_version.encode("ascii", "backslashreplace").decode()
    day = day_of(line.day)
    cost = money(line.cost)
    details = {"TokenType": token_type} if token_type else {}
    values: dict[str, Value] = {
        "BilledCost": cost,
        "BillingAccountId": PROVIDER.lower(),
        "BillingAccountName": PROVIDER,
        "BillingAccountType": "Installation",
        "BillingCurrency": currency,
        "BillingPeriodStart": _midnight(day.replace(day=1)),
        "BillingPeriodEnd": _midnight((day.replace(day=28) + datetime.timedelta(days=4)).replace(day=1)),
        "ChargeCategory": "Usage",
        "ChargeClass": "Correction" if group.is_correction else None,
        "ChargeDescription": f"{meter} of {model}, class {group.sla_class}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _midnight(day),
        "ChargePeriodEnd": _midnight(day + datetime.timedelta(days=1)),
        "ConsumedQuantity": line.quantity,
        "ConsumedUnit": unit,
        "ContractedCost": cost,
        "EffectiveCost": cost,
        "InvoiceIssuerName": PROVIDER,
        "ListCost": money(line.list_cost),
        "PricingCurrency": currency,
        "PricingCurrencyEffectiveCost": cost,
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "ResourceId": group.model,
        "ResourceName": group.model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": sku,
        "SkuMeter": meter,
        "SkuPriceDetails": msgspec.json.encode(details).decode(),
        "SkuPriceId": f"{sku}/{price_version or 'free'}",
        "SubAccountId": group.tenant_id,
        "SubAccountName": names.of(group.tenant_id) or group.tenant_id,
        "SubAccountType": "Tenant",
        "Tags": msgspec.json.encode({"key_id": group.key_id}).decode(),
        "x_NumRequests": line.num_requests,
        "x_PriceVersion": group.price_version,
        "x_SlaClass": group.sla_class,
        # Of a correction these may be null, but the quantity that is corrected is worth knowing.
        "ContractedUnitPrice": unit_price,
        "ListUnitPrice": list_unit_price,
        "PricingCategory": "Standard",
        "PricingCurrencyContractedUnitPrice": unit_price,
        "PricingCurrencyListUnitPrice": list_unit_price,
        "PricingQuantity": line.quantity / MILLION if is_token else line.quantity,
        "PricingUnit": f"{MILLION} {unit}" if is_token else unit,
    }
    return values


def _price(rate: int) -> Decimal:
    """In units of the currency, for a million tokens."""
    return Decimal(rate) / PARTS


def _midnight(day: datetime.date) -> datetime.datetime:
    return datetime.datetime(day.year, day.month, day.day, tzinfo=datetime.UTC)
