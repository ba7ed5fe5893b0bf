"""Everything that computes: one process, one device, no event loop."""
