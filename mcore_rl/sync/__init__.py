"""Weight sync, the trainer's side: sends live Megatron weights to running engines, along a plan that is made once.

Read ``update.py`` (the order of calls) first, then ``publish.py`` (what a training rank sends).
"""
