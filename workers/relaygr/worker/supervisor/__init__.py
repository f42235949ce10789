"""The supervisor of a worker with a hot standby: two children with one worker id, of which at most one is active.

`relaygr worker --standby` runs `Supervisor`. Both children run `relaygr worker`. Each prepares, then waits for the
worker's lock. When the holder of the lock dies, the kernel gives the lock to the other child, so the take-over does not
need the supervisor. The supervisor

* starts a first child, and the standby once the first child is active, so that they do not slow each other down;
* replaces each child that dies, after a back-off, and only so many times within a window;
* kills a child that sends no heartbeat: a stopped or hung process holds the lock until it is dead, and a missing
  heartbeat alone never gives the lock to another process;
* ends, with both children, when one was fenced: another process has the id, and the standby would fence it;
* passes SIGTERM, SIGINT and SIGHUP on. When it stops, it stops the standby first, so that the standby does not
  take over.

When the supervisor itself is killed, both children go on: the active one serves, and the standby would take over from
it. A new supervisor of the id adopts them. A child that nobody adopts for `worker.orphan_s` stops by itself.

Nothing here imports torch.

    heartbeat   the message from child to supervisor
    link        the child's connection to its supervisor, and its time without one
    records     what outlives a supervisor: records of the children, the supervisor's lock and its socket
    policy      the settings and the pure decisions: which child is started, killed, replaced
    supervisor  the children that it started or adopted, and the loop that carries out the decisions
    pages       the supervisor's HTTP pages
"""
