"""Which prefixes are worth computing: the latency model, the admission policy and its buckets.

The trigger decides by these from metadata; each worker decides again with what it alone knows. All of it is pure.
"""
