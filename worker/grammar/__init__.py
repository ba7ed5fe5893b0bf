"""Answers that keep to a grammar: what may come next in each, step by step, by llguidance.

Owns the vocabulary as grammars see it, compiled grammars and the guide of each sequence. Tokens are masked in
worker.sampling; which requests have a grammar is the wire's word, and what one means is in policies.grammar.
"""
