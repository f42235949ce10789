"""Collects the behaviours that the running system publishes, as Parquet files for training (docs/training.md).

| module | job |
|---|---|
| `folder` | names and identity of a folder of collected behaviours; what of it readers use. Needs no pyarrow |
| `deletions` | the users who were deleted lately |
| `files` | writes the files, and removes deleted users from them |
| `records` | the rows of a record, by the rules of the worker's history store |
| `collector` | reads the topics |
"""
