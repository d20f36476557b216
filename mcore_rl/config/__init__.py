"""Dataclasses per configuration group.  The only schema: yaml carries values, never types.  Imports no torch."""
