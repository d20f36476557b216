"""From verl's keys to ours: one table, of which the command ``from-verl``, the hints of ``train`` and a page are made.

Read ``row.py`` first, then the tables, then ``translate.py``.  ``keys.json`` has verl's own names and defaults.
"""
