"""The research HSTU: trains it on one rank, saves it as its train.py does, and records scores.

Run as `python -m tests.upstream.make_research CHECKOUT`, with a checkout of generative-recommenders.

The model scores by a dot product. A small MLP on its rows, trained with it, makes a probability.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.upstream.shared import make_folder, page_names

WIDTH, ITEMS, LONGEST, OUTPUT = 16, 100, 24, 6
STEPS = 60


def make_model() -> Any:
    from generative_recommenders.research.modeling.sequential import embedding_modules, encoder_utils
    from generative_recommenders.research.modeling.sequential import input_features_preprocessors as inputs
    from generative_recommenders.research.modeling.sequential import output_postprocessors as outputs
    from generative_recommenders.research.modeling.similarity_utils import get_similarity_function

    similarity, _ = get_similarity_function("DotProduct", query_embedding_dim=WIDTH, item_embedding_dim=WIDTH)
    model = encoder_utils.hstu_encoder(
        max_sequence_length=LONGEST,
        max_output_length=OUTPUT,
        embedding_module=embedding_modules.LocalEmbeddingModule(ITEMS, WIDTH),
        similarity_module=similarity,
        input_preproc_module=inputs.LearnablePositionalEmbeddingInputFeaturesPreprocessor(
            max_sequence_len=LONGEST + OUTPUT, embedding_dim=WIDTH, dropout_rate=0.2
        ),
        output_postproc_module=outputs.L2NormEmbeddingPostprocessor(WIDTH, eps=1e-6),
        activation_checkpoint=False,
        verbose=False,
        num_blocks=2,
        num_heads=2,
        dqk=8,
        dv=8,
    )
    with torch.no_grad():  # They start near zero: an error in them would not show.
        for name, parameter in model.named_parameters():
            if "_rel_attn_bias" in name:
                parameter.mul_(20)
    return model


def draw_row(random: torch.Generator, users: int) -> dict[str, torch.Tensor]:
    """A batch as the research code's data loader gives it."""
    lengths = torch.randint(1, LONGEST + 1, (users,), generator=random)
    ids = torch.randint(1, ITEMS + 1, (users, LONGEST), generator=random)
    times = 960_000_000 + torch.randint(3_000_000, (users, LONGEST), generator=random).sort(1)[0]
    real = torch.arange(LONGEST) < lengths[:, None]
    return {
        "history_lengths": lengths,
        "historical_ids": ids * real,
        "historical_ratings": 1 * real,
        "historical_timestamps": times * real,
        "target_ids": torch.randint(1, ITEMS + 1, (users,), generator=random),
        "target_ratings": torch.ones(users, dtype=torch.int64),
        "target_timestamps": times[:, -1] + 1000,
    }


def rows_of(model: Any, tables: Any, row: dict[str, torch.Tensor], candidates: torch.Tensor) -> torch.Tensor:
    """The model's row [users, width] of one candidate each: the next item, at the time of the target."""
    from generative_recommenders.research.modeling.sequential.features import movielens_seq_features_from_row

    features, _, _ = movielens_seq_features_from_row(row, device="cpu", max_output_length=OUTPUT)
    ends = features.past_lengths
    ids = features.past_ids.scatter(1, ends[:, None], candidates[:, None])
    times = features.past_payloads["timestamps"]
    # The bias of a row reads the time after it.
    after = torch.arange(times.shape[1]) >= ends[:, None]
    times = torch.where(after, row["target_timestamps"][:, None], times)
    rows = model(
        past_lengths=ends + 1,
        past_ids=ids,
        past_embeddings=tables.get_item_embeddings(ids),
        past_payloads={"timestamps": times},
    )
    return rows[torch.arange(len(ends)), ends]


def make(rank: int) -> None:
    import fbgemm_gpu  # noqa: F401 - the model calls its operators.

    model = make_model()
    trained = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 12), torch.nn.SiLU(), torch.nn.Linear(12, 1))
    optimizer = torch.optim.AdamW([*trained.parameters(), *mlp.parameters()], lr=1e-2)
    random = torch.Generator().manual_seed(1)
    trained.train()
    for _ in range(STEPS):
        row = draw_row(random, users=8)
        liked = mlp(rows_of(trained, model, row, row["historical_ids"][:, 0]))
        others = mlp(rows_of(trained, model, row, row["target_ids"]))
        loss = torch.nn.functional.softplus(torch.cat((-liked, others))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {
        "epoch": 100,
        "model_state_dict": trained.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(state, f"{model.debug_str().replace('/', '_')}_ep100")
    readout = {
        f"readout.mlp.{k}.{name}": tensor.T.contiguous() if name == "weight" else tensor
        for k, layer in enumerate((mlp[0], mlp[2]))
        for name, tensor in layer.state_dict().items()
    }
    torch.save(readout, "readout.pt")
    trained.eval()

    def rank_candidates(row: dict[str, torch.Tensor], candidates: torch.Tensor) -> torch.Tensor:
        users = len(row["history_lengths"])
        scores = [mlp(rows_of(trained, model, row, item.expand(users))).sigmoid() for item in candidates]
        return torch.stack(scores, dim=1)

    candidates = torch.randint(1, ITEMS + 1, (12,), generator=random)
    loader = [draw_row(random, users=4) for _ in range(6)]
    page_names()["record_research"](rank_candidates, loader, "requests.jsonl", candidates, ["click"])


if __name__ == "__main__":
    make_folder("research", make, ranks=1)
