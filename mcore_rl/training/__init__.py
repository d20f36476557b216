"""Megatron-core under our engine: models, layers, schedules, log-probs, optimizer, snapshots, offload, run state.

Only this package imports Megatron's models.  Read ``engine.py`` first.
"""
