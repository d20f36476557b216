"""Proofs about weights, without a GPU: that tables are complete, that plans move every element to its place.

Read ``verify.py`` first: it says what is proven of a family, a training layout and a rollout layout.
"""
