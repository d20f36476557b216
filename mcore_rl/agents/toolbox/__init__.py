"""The tools that are built in: a calculator, a confined Python interpreter, the check of a GSM8K answer."""
