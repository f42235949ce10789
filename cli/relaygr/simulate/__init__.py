"""Plans and simulates a fleet with the product's own decisions, in virtual time. Nothing is computed, no byte is moved.

visit     the device work of one visit, and when the relay saves some: the arithmetic of every plan
case      what all share: demand, settings, model, measured times, and what happens to the workers
times     measured times of what a calibration does not cover, learnt from a run's records
demand    which users belong to a part of the fleet, and their impressions
device    what a simulation replaces: device, engine, histories, and the link between the tiers
worker    one worker: the product's executor, cache and policies over the replaced parts
relay     gateway, trigger, Kafka hops and one worker, as one discrete-event model (simpy)
figures   the figures of simulations, with the number of samples and the sampling error
fleet     which part of a fleet is simulated, how often, and on how many processes
plan      how many workers a load and a time limit need
size      what a fleet needs beside: memory, network, device work
"""
