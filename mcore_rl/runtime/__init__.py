"""Ray: nodes, placement, training workers, engine actors, and the calls to them.  Thin: no mathematics.

Read ``train_group.py`` first, the interface of the training workers to the controller; then ``train_worker.py``, the
worker itself.
"""
