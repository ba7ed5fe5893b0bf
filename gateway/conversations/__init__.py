"""Conversations: items in their order, which responses go on from and are added to.

Their items are those of responses (``gateway/responses/items.py``); what is their own are their shapes (``shapes``) and
where they lie (``shelf``). Where the shapes were read: openai-python's ``src/openai/types/conversations``.
"""
