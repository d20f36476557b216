"""What a role is: a record of it; the table of those that there are is ``role_table.py``."""

from __future__ import annotations

from enum import Enum


class Head(Enum):
    """What a model ends in.  ``lm``: logits over the vocabulary.  ``value``: one number a token, the value head's."""

    lm = "lm"
    value = "value"
