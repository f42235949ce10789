"""The card of a checkpoint: what it was trained on, how good it is, and what it must not be used for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from relaygr.training.logs import Ties
from relaygr.training.models import CASCADE, RANKER, RETRIEVAL
from relaygr.training.sampling import FOUND

if TYPE_CHECKING:
    from relaygr.training.options import PostTrainingOptions
    from relaygr.training.pipeline import Finished
    from relaygr.training.ranking import Estimate

WEAK_ORDER = (
    "The order of ratings within one evening is weak evidence about sequences: a log of ratings says when an item was "
    "rated, not when it was watched."
)


def checkpoint_card(run: dict[str, Any], finished: Finished, revision: str) -> str:
    """Markdown, from the content of `run.json` and the result."""
    log, options, split = run["log"], run["options"], finished.split
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        "# Ranker",
        "",
        f"HSTU, revision `{revision}`, trained by `relaygr train ranker` ({versions}; Python {run['python']}).",
        "",
        f"* Log: {log['behaviours']:,} behaviours of {log['users']:,} users, digest `{log['digest']}`; "
        f"{log['ties_share']:.0%} share their time with the user's behaviour before or after, and are ordered "
        f"{Ties(run['ties']).said}. {WEAK_ORDER}",
        f"* Split: `{split['protocol']}`{_cuts(split)}; {split['training']:,} behaviours for training, "
        f"{split['validation']:,} for validation, {split['test']:,} for test, of which "
        f"{split['test_outside_vocabulary']:,} are of items outside the vocabulary of {split['items']:,}. For "
        f"{split['ties_at_test']:.0%} of the users the first behaviour of the test has the time of the one before it.",
        f"* Candidates: {_candidates(split)}{', but those of the history' if split['leaves_out_seen'] else ''}.",
        f"* Options: {', '.join(f'{name} {value}' for name, value in options.items())}.",
        f"* Best epochs by validation: {', '.join(f'{best + 1} of {stage}' for stage, best in finished.best.items())}.",
        "",
        "Scores: `next` is the logit of a soft-max over items, which orders candidates and is no probability"
        + (
            f"; `liked` is the probability of a rating of at least 4, which {split['liked_share']:.1%} of the training "
            "part are."
            if split["has_liked"]
            else "."
        ),
        "",
        *(line for note in finished.notes for line in (note, "")),
        "## Test part",
        "",
        *metrics_table(finished.test),
        "",
        f"`{CASCADE}` is what is served: the {FOUND} items that retrieval finds, ordered by `next`. `{RETRIEVAL}` is "
        f"retrieval's own order of all items, `{RANKER}` that of `next`. Means over users with 95 % intervals. NDCG@10 "
        f"of `{CASCADE}` less that of another, in pairs of the same user:",
        "",
        *(f"* {name}: {gain.with_interval()}" for name, gain in finished.gains.items()),
        "",
        "The figures hold for this log and split. Users and items that are not in the log were not judged.",
    ]
    return "\n".join(lines) + "\n"


def post_trained_card(about: str, options: PostTrainingOptions, test: dict[str, Estimate]) -> str:
    """Markdown for a checkpoint of `relaygr train post-train`."""
    asked = ", ".join(f"{name} {value}" for name, value in asdict(options).items())
    lines = [
        f"# Ranker, post-trained\n\nBy `relaygr train post-train`: {about}. The card of the ranker that it began with, "
        f"revision `{options.start}`, describes log, split and scores. {WEAK_ORDER} Options: {asked}.\n",
        *metrics_table({"post-trained": test}),
        "\nMeans over users of the test part with 95 % intervals.",
    ]
    return "\n".join(lines) + "\n"


def _cuts(split: dict[str, Any]) -> str:
    """The times of a split of all users."""
    if split["cuts_ms"] is None:
        return ""
    first, second = (np.datetime64(cut_ms, "ms").astype("datetime64[s]") for cut_ms in split["cuts_ms"])
    return f", with validation from {first} UTC on and test from {second} UTC on"


def _candidates(split: dict[str, Any]) -> str:
    if split["ranked_items"] == split["items"]:
        return "all items of the vocabulary"
    return f"{split['ranked_items']:,} random items of the vocabulary and those held out, which flatters every model"


def metrics_table(test: dict[str, dict[str, Estimate]]) -> list[str]:
    """The lines of a Markdown table: a row for each model."""
    names = list(dict.fromkeys(name for metrics in test.values() for name in metrics))
    lines = [f"| model | {' | '.join(names)} | users |", f"|---|{'---|' * (len(names) + 1)}"]
    for model, metrics in test.items():
        cells = [metrics[name].with_half_width() if name in metrics else "" for name in names]
        lines.append(f"| {model} | {' | '.join(cells)} | {max(each.users for each in metrics.values()):,} |")
    return lines
