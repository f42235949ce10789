"""A worker above its capacity: goodput, refusals and wasted device time, against the offered load."""
