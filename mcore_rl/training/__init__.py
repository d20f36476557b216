"""Megatron-core under our engine: models, layers, schedules, log-probs, optimizer, snapshots, offload, run state.

What needs Megatron is here.  Read ``engine.py`` first.
"""
