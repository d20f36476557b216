"""Agents: episodes of many turns, with tools, whose trained tokens are the tokens that were drawn.

``rendering`` turns what is appended to a conversation into tokens, ``tools`` and ``toolbox`` are what a model can call.
Read ``rendering.py`` first.
"""
