"""The door for a ranker of your own: subclass `Ranker`, and name it in the `config.json` of its folder.

docs/rankers.md is the way from an `nn.Module` to the relay. What is exported here is stable.
"""

from relaygr.ranker.interface import Computed, History, Kv, ModelFolder, Past, Ranker, Shape

__all__ = ["Computed", "History", "Kv", "ModelFolder", "Past", "Ranker", "Shape"]
