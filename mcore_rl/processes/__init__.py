"""Processes beside a program, and how they end with it."""
