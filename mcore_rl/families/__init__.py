"""Model families as data: one file each, which reads its ``config.json`` and lists where its tensors are.

Rules are pure: they read and move no tensor and communicate nothing.  Read ``family.py``, ``rules.py``, then
``qwen2.py``.
"""
