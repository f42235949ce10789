"""User histories at a worker: an LMDB store, the follower that feeds it, and which version a request gets."""
