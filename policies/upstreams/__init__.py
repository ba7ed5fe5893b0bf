"""Judgement about servers that are not ours: whom to ask, when to ask again, when to stop asking, what to believe."""
