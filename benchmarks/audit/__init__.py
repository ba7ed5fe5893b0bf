"""Whether every token is owed exactly once while gateways and workers are killed: ``python -m benchmarks.audit``."""
