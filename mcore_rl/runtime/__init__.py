"""Ray: nodes, placement, training workers, engine actors, and the calls to them.  Thin: no mathematics.

Read ``train_group.py`` first: what a controller can ask of training workers; then ``train_worker.py``, which does it.
"""
