"""What every process needs: a clock, errors for people, logs, and the pages that it serves over HTTP."""
