"""The commands of `relaygr`. Each is a module of its own, which is imported only when the command is called.

`relaygr --help` imports this table and no command, and `relaygr topics` does not import torch. A command is a
`typer.Typer` or a function, named here as `module:attribute`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A command's module and attribute, its line in `relaygr --help`, and the package extras that it needs."""

    target: str
    help: str
    extras: str = "cli"


COMMANDS: dict[str, CommandSpec] = {
    "demo": CommandSpec("relaygr.cli.demo:demo", "Run the whole relay here, on and off, and compare.", "all"),
    "topics": CommandSpec("relaygr.cli.topics:app", "Create or check the topics; print the rights on them."),
    "worker": CommandSpec("relaygr.cli.worker:app", "Run a worker: pre-infer, cache and rank.", "worker"),
    "trigger": CommandSpec("relaygr.cli.trigger:trigger", "Run the trigger.", "trigger"),
    "traffic": CommandSpec("relaygr.cli.traffic:traffic", "Drive traffic and print its figures.", "cli,http"),
    "gateway": CommandSpec("relaygr.cli.gateway:gateway", "Serve the relay over HTTP.", "gateway"),
    "publish": CommandSpec("relaygr.cli.publish:app", "Publish events, ranking requests, histories, behaviours."),
    "ui": CommandSpec("relaygr.cli.ui:ui", "Serve a live page over the cluster, for a browser.", "lag"),
    "doctor": CommandSpec("relaygr.cli.doctor:doctor", "Check everything, and say what to mend."),
    "lag": CommandSpec("relaygr.cli.lag:app", "Show the consumers' lag, in messages and in seconds.", "lag"),
    "model": CommandSpec("relaygr.cli.model:app", "Make, convert, show and compare checkpoints.", "worker"),
    "data": CommandSpec("relaygr.cli.data:app", "Get a public log of interactions.", "training"),
    "train": CommandSpec("relaygr.cli.train:app", "Train a ranker; say what longer histories are worth.", "training"),
    "cache": CommandSpec("relaygr.cli.cache:app", "Look at a running worker's cache.", "worker"),
    "calibrate": CommandSpec("relaygr.cli.calibrate:calibrate", "Measure a device; fit its latency model.", "worker"),
    "simulate": CommandSpec("relaygr.cli.simulate:app", "Simulate a fleet; plan its capacity.", "bench"),
    "size": CommandSpec("relaygr.cli.size:size", "Say how large a fleet must be, and what the relay saves.", "bench"),
    "vectors": CommandSpec("relaygr.cli.vectors:vectors", "Check the model against a file of test vectors.", "worker"),
    "bench": CommandSpec("relaygr.cli.bench:app", "Run a benchmark, or list the benchmarks.", "bench"),
    "settings": CommandSpec("relaygr.cli.settings:show", "Print the effective settings and the origin of each."),
}  # fmt: skip
