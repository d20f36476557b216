"""What a run says of itself: metric names, time, the files of the run directory, loggers, and the report.

It computes nothing about learning and imports no torch: everything here works on floats and rows that others made, and
the report works from the files alone.
"""
