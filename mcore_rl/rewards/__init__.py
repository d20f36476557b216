"""Grading of responses: graders by data source, confinement of programs, and processes that grade in parallel."""
