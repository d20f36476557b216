"""The commands of ``mcore-rl``, a file for each; the main programs share ``programs.py``.

A command is a module (or an object) with the two functions of ``mcore_rl.cli.Command``.  It is imported when it is
asked for, and imports torch, Ray, vLLM and hydra only in ``run``, so that its help is there at once.  What it computes
is in the rooms below: here are options, and what is printed.  Read ``plan.py`` first.
"""
