"""Weight sync, the trainer's side: live Megatron weights go to running engines along a plan that is made once.

Read ``update.py`` (who is asked for what, in which order) first, then ``publish.py`` (what a training rank sends).
"""
