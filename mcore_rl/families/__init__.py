"""Model families as data: one file for each, with what its config.json means and where each of its tensors lies.

Rules are pure: no tensor is read or moved, nothing is communicated.  Read ``family.py``, ``rules.py``, then
``qwen2.py``.
"""
