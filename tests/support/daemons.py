"""What a user's function may leave behind: a process that forked twice and has a session of its own."""

from __future__ import annotations

# Source to stand at the end of a user's file: ``daemon()`` starts one, and returns its process id.
DAEMON = """

def daemon() -> int:
    import os
    import time

    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    return int(os.read(reading, 100))
"""
