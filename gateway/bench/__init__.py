"""`penstock bench serve`: load on any OpenAI-compatible URL, and what its clients felt.

arrivals says when which request of which length is due, prompts makes its text, load sends them, measures condenses
what came back, plot draws it, command is the way in from the terminal.
"""
