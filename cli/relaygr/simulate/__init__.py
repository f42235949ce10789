"""Simulates a fleet with the product's own decisions, in virtual time. Nothing is computed and no byte is moved.

    case      the simulated case, from settings and a calibration
    times     measured times of the parts that a calibration does not cover, learnt from a run's records
    demand    which users belong to a part of the fleet, and their impressions
    device    the parts that a simulation replaces: clock, device, engine and histories
    worker    one worker: the product's executor, cache and policies over the replaced parts
    relay     gateway, trigger, Kafka hops, workers, failures and autoscaling, as one discrete-event model (simpy)
    figures   the figures of a simulation, with the number of samples and the sampling error
    fleet     which part of a fleet is simulated, how often, and on how many processes
    plan      how many workers a load and a time limit need
    size      what a fleet needs beside: memory, network, device work
    output    tables, JSON and plots

The trigger's handler, fleet view, policy and buckets, the worker's executor (admission, order, plan, batches) and both
cache tiers are those of the product. Simulated are the durations of device work (calibrated times, times a measured
noise), the link between the tiers, and the time of messages on Kafka. Every figure is a prediction.

Not simulated: consumers that pause, result retries, clocks that differ, waits for histories, reloads that a ranking
overlaps, requests that a worker diverts, and scenarios other than the default one. Requests that are sent to a dead
worker wait for the next owner of their partition.
"""
