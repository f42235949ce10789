"""Open-loop traffic: the users, the schedule of their impressions, the gateway that plays it, and its records."""
