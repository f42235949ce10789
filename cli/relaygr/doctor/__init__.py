"""`relaygr doctor`: looks at everything that a relay needs, and says what to do about each problem.

findings.py    a finding and its verdict, the exit code; no I/O
judge.py       turns observations into findings; no I/O
observe.py     looks at Kafka, the fleet, this machine and the model
impression.py  sends one impression through the running relay
examine.py     the checks in their order, each bounded in time
"""
