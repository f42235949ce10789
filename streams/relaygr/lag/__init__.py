"""Consumer lag: how far each group is behind in messages and seconds, who owns each partition, and the trend.

collector   polls Kafka; joins no group that it measures
model       the result of one poll, and the owner split
status      Burrow's rules over the last polls
report      all of that as one report, with the lag in seconds; pure
monitor     polls in the background
exporter    the report as Prometheus metrics; a scrape sends no request to Kafka
"""
