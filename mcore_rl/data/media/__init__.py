"""Pictures as data: which picture a row has, how large it becomes, its patches, its place among tokens and positions.

No model is here, and nothing is fetched.  Read ``placed.py`` first; ``images.py`` reads files, ``pixels.py`` makes
patches, ``prompts.py`` puts pictures into prompts, and ``batch.py`` numbers their tokens.
"""
