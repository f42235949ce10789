"""The open-loop load generator: traces, how they are made, and the process that plays them.

A *trace* is a file with one line for each impression, made before the run and equal for all systems that are compared.
A *sample* is what became of one impression; all samples of a run are kept in a file.
"""
