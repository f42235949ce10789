"""A causal decoder of Hugging Face's `transformers` as a ranker, over semantic ids (extra `transformers`).

An item is a tuple of tokens. The score of a candidate is the log-likelihood of its tokens after those of the history.
All candidates of a request go through the decoder in one pass: each sees the prefix, the suffix and itself.

The decoder's answer for the last token of the prefix is needed too, so `rank` computes that row again. Its token is the
state, in digits that are exact in each type of K,V.

The folder: `config.json` names this class, the decoder (a folder in it, with weights as safetensors) and the table of
the items' tokens (a file in it, tensor `tokens` [items, tokens per item], and with other ids than row numbers `ids`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from relaygr.ranker.interface import Computed, History, ModelFolder, Past, Ranker, Shape
from relaygr.runtime.files import require_regular

_BASE = 16
_DIGITS = 6
_FULL = "full_attention"
_ITEMS = "items.safetensors"


class CausalLM(Ranker):
    """Options: `decoder` and `items`, names in the folder; `max_history`, `max_suffix` and `max_candidates`."""

    version = "2"

    def __init__(self, folder: ModelFolder) -> None:
        """Raises OSError, and ValueError for a decoder whose layers forget, whose vocabulary lacks tokens, or whose
        weights are not those that it has.
        """
        super().__init__(folder)
        options = folder.options
        decoder, items = folder.path / options.get("decoder", "decoder"), folder.path / options.get("items", _ITEMS)
        # The libraries would wait for the writer of a pipe.
        for path in (items, *decoder.iterdir()):
            if not path.is_dir():
                require_regular(path)
        # They are in the log of a worker, and start a thread.
        disable_progress_bar()
        # Its own code never runs, and neither does a pickle.
        model, found = AutoModelForCausalLM.from_pretrained(
            decoder,
            dtype=folder.dtype,
            attn_implementation="sdpa",
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
        # Missing weights would be random ones, others at each load.
        for what in ("missing_keys", "unexpected_keys"):
            if names := sorted(found[what]):
                raise ValueError(
                    f"{len(names)} of its weights are {what.removesuffix('_keys')}, such as {names[0]}: save the "
                    "decoder itself by `save_pretrained`, without wrappers, adapters or other heads"
                )
        self._model = model.to(folder.device).eval()
        self._config = self._model.config.get_text_config(decoder=True)
        kinds = set(getattr(self._config, "layer_types", None) or [_FULL])
        if kinds != {_FULL}:
            raise ValueError(f"it has layers of the kinds {', '.join(sorted(kinds))}: only {_FULL} keeps all K,V")
        if getattr(self._config, "use_sliding_window", False):
            raise ValueError("its layers have a sliding window, and keep only the K,V of that")
        tables = load_file(items)
        self._tokens: torch.Tensor = tables["tokens"].long().to(folder.device)
        self._ids: torch.Tensor | None = tables["ids"].long().to(folder.device) if "ids" in tables else None
        largest = int(self._tokens.max())
        if not 0 <= int(self._tokens.min()) <= largest < self._config.vocab_size:
            raise ValueError(f"tokens of items reach {largest}, its vocabulary has {self._config.vocab_size}")

    def shape(self) -> Shape:
        config, options = self._config, self.folder.options
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        tokens = int(self._tokens.shape[1])
        max_history = int(options["max_history"])
        longest = (max_history + int(options.get("max_suffix", 0)) + 1) * tokens
        if longest > config.max_position_embeddings:
            raise ValueError(
                f"max_history {max_history} needs {longest} positions, the decoder has {config.max_position_embeddings}"
            )
        return Shape(
            layers=config.num_hidden_layers,
            heads=config.num_key_value_heads,
            key_dim=dim,
            value_dim=dim,
            num_items=int(self._tokens.shape[0]),
            max_history=max_history,
            max_candidates=int(options.get("max_candidates", 256)),
            max_suffix=int(options.get("max_suffix", 0)),
            tasks=("log_likelihood",),
            state_dim=_DIGITS,
            rows_per_behaviour=tokens,
        )

    def known_items(self) -> Sequence[int] | None:
        return None if self._ids is None else self._ids.tolist()

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        tokens = self._tokens_of(history.items).flatten()[start:end]
        cache = _cache_of(past, past.rows)
        places = torch.arange(start, end, device=tokens.device)
        self._model.model(input_ids=tokens[None], position_ids=places[None], past_key_values=cache, use_cache=True)
        layers = [(layer.keys[0, :, start:], layer.values[0, :, start:]) for layer in cache.layers]
        return Computed(layers, _digits_of(tokens))

    def rank(self, suffix: History, candidates: torch.Tensor, past: Past, state: torch.Tensor | None) -> torch.Tensor:
        behind = self._tokens_of(suffix.items).flatten()
        known = 0
        if state is not None:
            behind, known = torch.cat((_token_of(state)[None], behind)), past.rows - 1
        wanted = self._tokens_of(candidates)
        if not behind.numel():
            # A user without a history: the decoder has nothing to read.
            return torch.zeros(candidates.shape[0], 1, device=candidates.device)
        asked = wanted[:, :-1]
        rows = torch.cat((behind, asked.flatten()))
        of_candidates = torch.arange(asked.shape[1]).repeat(asked.shape[0])
        places = torch.cat((torch.arange(behind.shape[0]), behind.shape[0] + of_candidates))
        mask = _mask(known, behind.shape[0], *asked.shape)
        # By the whole decoder: some scale or bound what their head gives.
        logits: torch.Tensor = self._model(
            input_ids=rows[None],
            position_ids=(known + places)[None].to(rows.device),
            attention_mask=mask[None, None].to(rows.device),
            past_key_values=_cache_of(past, known),
            use_cache=True,
            logits_to_keep=asked.numel() + 1,
        ).logits[0]
        chances = logits.float().log_softmax(-1)
        inner = chances[1:].view(*asked.shape, chances.shape[1]).gather(2, wanted[:, 1:, None])
        return chances[0, wanted[:, 0], None] + inner.sum(1)

    def _tokens_of(self, items: torch.Tensor) -> torch.Tensor:
        """int64 [items, tokens per item]. Unknown items have the tokens of the last one."""
        last = self._tokens.shape[0] - 1
        if self._ids is None:
            rows = torch.where((items < 0) | (items > last), last, items)
        else:
            rows = torch.searchsorted(self._ids, items).clamp(max=last)
            rows = torch.where(self._ids[rows] == items, rows, last)
        return self._tokens[rows]


def _cache_of(past: Past, rows: int) -> DynamicCache:
    cache = DynamicCache()
    if rows:
        for layer, (k, v) in enumerate(past):
            cache.update(k[None, :, :rows], v[None, :, :rows], layer)
    return cache


def _mask(known: int, behind: int, candidates: int, tokens: int) -> torch.Tensor:
    """Whether each row sees each key: bool [rows, known + rows]. The rows behind the known ones are causal; those of a
    candidate see all of them, and their own candidate's up to themselves.
    """
    rows = behind + candidates * tokens
    sees = torch.zeros(rows, known + rows, dtype=torch.bool)
    sees[:, :known] = True
    sees[:behind, known : known + behind] = torch.ones(behind, behind).tril().bool()
    sees[behind:, known : known + behind] = True
    own = torch.eye(candidates).repeat_interleave(tokens, 0).repeat_interleave(tokens, 1).tril()
    sees[behind:, known + behind :] = own.bool()
    return sees


def _digits_of(tokens: torch.Tensor) -> torch.Tensor:
    """[rows, digits]: whole numbers below 16, which each type of K,V holds exactly."""
    powers = _BASE ** torch.arange(_DIGITS, device=tokens.device)
    return (tokens[:, None] // powers % _BASE).float()


def _token_of(digits: torch.Tensor) -> torch.Tensor:
    powers = _BASE ** torch.arange(_DIGITS, device=digits.device)
    return (digits.round().long() * powers).sum()
