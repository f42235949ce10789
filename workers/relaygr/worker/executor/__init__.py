"""The executor: carries pre-infer jobs and ranking requests through history, cache and device.

It belongs to one thread, the device thread, which calls `step`; everything else reaches it through
`post`. A step takes what was posted, fires what is due, and runs one piece of device work: a chunk of
one prefix, or a batch of ranking requests. So no request waits behind more than one piece.

Full inference is not a second code path: it is the chunks of a prefix followed by a ranking pass, and
its K,V is published if there is room.

    executor   the loop
    ranking    requests: look up, choose a way, answer
    waiting    what a request waits for, and until when
    batches    the ranking pass: which requests go together, and what runs beside them
    jobs       pre-infer jobs: what is there already, what is to be computed or reloaded
    prefixes   prefixes under computation, shared by both
    pieces     pieces of prefixes on the device
    shared     the device's parts, and the accounts of its time
"""
