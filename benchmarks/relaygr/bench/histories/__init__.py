"""The history store of one worker: its size, look-ups, appends, deletions, and the follower that fills it."""
