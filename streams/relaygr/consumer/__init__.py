"""The consumer of a worker's messages: poll thread, commit watermark, finished offsets for a successor.

loop        the poll thread, which owns the client
interface   the types between the loop and its handler
membership  this process as a member of its group
offsets     where partitions are read from, and what is committed
watermark   the offset up to which every message is finished
finished    that offset in a mapped file, for the next process
pauses      the partitions whose delivery is paused
health      whether brokers answer, messages arrive and topics exist
leave       how a static member leaves its group at once
"""
