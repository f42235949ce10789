"""Trains a ranker on a log of interactions, and measures what its histories are worth.

    log -> split (by time of each user) -> vocabulary, from the training part only
        -> trainer -> run folder: configuration, state, checkpoint, metrics, card
        -> baselines and ranking of all items on the same split
        -> lengths: the same users, served their newest 16, 32, ... behaviours

The model is the worker's: the trainer computes its form (`layers.py`) on the tensor names of a checkpoint, and a worker
loads the result without conversion. Nothing but the command line imports this package.
"""
