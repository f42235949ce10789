"""Shared by every process: clocks, errors, settings, logging, and the HTTP server of metrics and probes."""
