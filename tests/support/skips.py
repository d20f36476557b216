"""The words that a skip's reason begins with: they say whether a machine that installs everything may skip the test.

What no installation can bring is an accelerator, another user or a kernel.  Everything else is not installed, and
``make test-ci`` installs it.  A parameter for which there is nothing to test is no case, and is not generated.
"""

from __future__ import annotations

ACCELERATOR = "accelerator: "  # is missing, too small, or there where the test is of machines without one
ANOTHER_USER = "another user: "  # this one cannot become him
KERNEL = "kernel: "  # with what it lets this user mount, the processor's features and the C library
NOT_INSTALLED = "not installed: "
REASONS = (ACCELERATOR, ANOTHER_USER, KERNEL, NOT_INSTALLED)


def not_installed(name: str) -> str:
    """Says that ``name`` is missing, and what installs it."""
    return f"{NOT_INSTALLED}make test-ci installs {name}"
