"""The parts of one training step, in the order of ``controller/loop.py``: collect, assemble, score, estimate, train."""
