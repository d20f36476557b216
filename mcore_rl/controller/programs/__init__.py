"""What a command line calls: one file for each of ``mcore-rl train``, ``sft``, ``generate`` and ``evaluate``."""
