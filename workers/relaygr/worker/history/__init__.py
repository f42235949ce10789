"""User histories in a worker: the LMDB store, the follower that fills it, and the version that a request gets."""
