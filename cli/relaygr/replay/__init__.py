"""What another cache would have done with the same requests.

    demand         who asked for which prefix, when: from a recorded trace (or `making`: from a log, or a schedule)
    run            the demand against the real books, with another policy and size, on a virtual clock
    side_by_side   several candidates at once
    bound          what no policy could have beaten
    tables, plots  for people

A replay moves no bytes and computes nothing. Computing takes no time in it, copies take the link's; so it
tells policies and sizes apart, not queues.
"""
