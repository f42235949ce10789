"""What the HTTP gateway adds to the latency of a ranking request: `python -m benchmarks.gateway`."""
