"""The supervisor of a worker with a hot standby: two children under one worker id, and never more than one that owns.

`relaygr worker --standby` runs `Supervisor`. Both children are the same `relaygr worker`; each prepares, then
waits for the worker's lock, which the kernel gives to the next one the moment its holder is dead. So the take-over
itself does not pass through here. The supervisor

* starts a first child, and a second one once the first is active, so that they do not slow each other down;
* replaces each that dies, after a pause that doubles, so many times within a window;
* kills a child for good that gives no sign of life: a stopped or hung process holds the lock until it is dead.
  Silence never grants the lock, it only ends a process;
* ends, with both children, when one was fenced: the id is another's, and the standby would steal it back;
* passes SIGTERM, SIGINT and SIGHUP on. When it stops, the standby goes first, so that it takes over nothing.

A child whose supervisor is gone stops by itself: nobody would replace it.

Nothing here imports torch.

    settings    what may be set
    beats       what a child tells, a few times a second
    leash       the child's end of the line
    judge       what is to be done: pure decisions
    child       one process
    supervisor  the loop that carries the decisions out
    pages       what the supervisor serves over HTTP
"""

from relaygr.worker.supervisor.settings import SupervisorSettings

__all__ = ["SupervisorSettings"]
