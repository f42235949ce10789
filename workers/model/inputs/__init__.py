"""What enters the first layer: look-ups in numpy on any thread, embedding on the device (docs/model.md)."""

from workers.model.inputs.gates import FeatureGates
from workers.model.inputs.token_inputs import TokenEmbedding, TokenLookup
from workers.model.inputs.tokens import Column, FoundTokens, Tokens
from workers.model.inputs.vocabulary import IDS_TENSOR, Vocabulary

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
