"""Servers elsewhere that answer for models: which there are, who of them is asked, and what they say."""
