"""Weights and training state on disk: Hugging Face, Megatron's ``torch_dist`` and a run's own files, in and out.

Everything that opens, writes or names a file of weights is here; ``weights`` decides which part of which tensor goes
where.  No process group is started.  Read ``load.py`` (Hugging Face to Megatron) first, then ``export.py``, the way
back.
"""
