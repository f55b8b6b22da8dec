"""One orbax save is begun at a time in a process.

Orbax (0.12.8) matches the parts of a save by a counter that belongs to the whole process: each part
reads it while `save` is called. Two savers that begin at once, a checkpoint and a published
version, therefore wait for each other's folders until a timeout, and delete each other's. What goes
on in the background after `save` has returned knows its number, so the lock covers the call alone.
"""

import threading

BEGINNING = threading.Lock()
"""Held around every call of an orbax `save`."""
