"""The parts of the sampler: adjustments of single logits, the vocabulary in tiles, the filters, and the draw."""
