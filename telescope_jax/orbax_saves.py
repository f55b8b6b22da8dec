"""What orbax must be told: one save begins at a time, and which processes take part.

Orbax (0.12.8) matches the parts of a save by a counter that belongs to the whole process: each part
reads it while `save` is called. Two savers that begin at once, a checkpoint and a published
version, therefore wait for each other's folders until a timeout, and delete each other's. What goes
on in the background after `save` has returned knows its number, so the lock covers the call alone.
"""

import threading

import jax
import orbax.checkpoint as ocp

Processes = ocp.options.MultiprocessingOptions

BEGINNING = threading.Lock()
"""Held around every call of an orbax `save`."""


def by_all() -> Processes:
    """For what all processes of a trainer write or read together.

    Naming them makes orbax wait at barriers of the coordination service. Its default is a
    collective on the devices, which would have to take its turn among those of the updates.
    """
    count = jax.process_count()
    return Processes(active_processes=set(range(count)) if count > 1 else None)


def by_this_one() -> Processes:
    """For what one process of a trainer reads while the others do something else."""
    if jax.process_count() == 1:
        return Processes()
    return Processes(primary_host=jax.process_index(), active_processes={jax.process_index()})
