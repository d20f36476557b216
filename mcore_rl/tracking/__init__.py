"""The record of a run: metric names, time, the files of the run directory, loggers, and the report.

No torch and no arithmetic of learning: everything here works on the caller's floats and rows, and the report works from
the files alone.  Read ``sinks.py`` (what a run writes) first, then ``report.py``.
"""
