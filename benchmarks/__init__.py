"""How fast it is: measured side by side, never asserted in a test."""
