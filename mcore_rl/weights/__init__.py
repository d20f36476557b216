"""The map of weights: which rank holds which part of which tensor, and the plan that moves parts between layouts.

Integers and names; no file is opened and nothing is sent.  Read ``table.py`` first, then ``reshard.py``.
"""
