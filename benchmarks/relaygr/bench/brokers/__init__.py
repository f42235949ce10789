"""The cost of losing a broker of three under load, by what happens to it: killed, stopped, restarted, two stopped."""
