"""A whole run on one GPU of a machine that has little more than torch: what it needs is built here, without a GPU.

``packages.py`` says what such a machine lacks, ``build.py`` makes a kit of it, and ``parts.py`` what is run there.
"""
