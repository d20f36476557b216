"""Ray: nodes, placement, training workers, engine actors, and the calls to them.  Thin: no mathematics.

Read ``worker_group.py`` first, then ``train_worker.py``.
"""
