"""Admission of pre-infer jobs: the latency model, the admission policy and its buckets. All of it is pure.

The trigger decides from the metadata of an event. Each worker decides again, with the state of its own cache.
"""
