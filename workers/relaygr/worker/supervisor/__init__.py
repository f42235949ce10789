"""The supervisor of a worker with a hot standby: two children with one worker id, of which at most one is active.

docs/architecture.md describes what it does. `relaygr worker --standby` runs `Supervisor`, both children run
`relaygr worker`. Nothing here imports torch.

    heartbeat   the message from child to supervisor
    link        the child's connection to its supervisor, and its time without one
    records     what outlives a supervisor: records of the children, the supervisor's lock and its socket
    policy      the settings and the pure decisions: which child is started, killed, replaced
    children    the supervisor's end of a child that it started or adopted
    supervisor  the loop that carries out the decisions
    probes      the supervisor's HTTP pages
"""
