"""How many requests a second three systems carry within one deadline.

question   loads, systems, settings, and whether a run has passed: pure
run        measures the engine alone, starts the processes, plays a run, reads its records
search     which run comes next, live and in virtual time; every run is a row of a file
report     the table, the plot and the page, from the rows alone
"""
