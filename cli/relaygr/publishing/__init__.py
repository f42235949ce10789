"""Publishing from JSON lines: lines to objects, objects to messages, messages sent at a rate, outcomes printed."""
