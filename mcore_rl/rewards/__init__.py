"""Grading of responses: graders by data source, programs in confinement, and the processes that do it in parallel."""
