"""`relaygr doctor`: looks at everything that a relay needs, and says what to do about each problem.

judge.py    turns observations into findings, each with a verdict; no I/O
observe.py  looks at Kafka, the fleet, this machine and the model, and sends one impression through the running relay
examine.py  the checks in their order, each bounded in time
"""
