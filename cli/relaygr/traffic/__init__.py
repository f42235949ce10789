"""Open-loop traffic: the users, the schedule of their impressions, the player of the schedule, and the records."""
