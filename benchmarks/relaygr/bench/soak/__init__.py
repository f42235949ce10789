"""Minutes of traffic with kills, reloads and a broker restart: what grows, and do the counters add up?"""
