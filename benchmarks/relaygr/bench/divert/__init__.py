"""The late requests of an unevenly loaded fleet, with and without `worker.divert`."""
