"""What enters the first layer: look-ups in numpy on any thread, embedding on the device (docs/model.md)."""

from relaygr.worker.model.inputs.gates import FeatureGates
from relaygr.worker.model.inputs.token_inputs import TokenEmbedding, TokenLookup
from relaygr.worker.model.inputs.tokens import Column, FoundTokens, Tokens
from relaygr.worker.model.inputs.vocabulary import IDS_TENSOR, Vocabulary

__all__ = [
    "IDS_TENSOR",
    "Column",
    "FeatureGates",
    "FoundTokens",
    "TokenEmbedding",
    "TokenLookup",
    "Tokens",
    "Vocabulary",
]
