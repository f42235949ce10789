"""`python -m tests.worlds.few_files SOFT HARD relaygr ...`: a command with these limits of open files."""

from __future__ import annotations

import os
import resource
import sys

if __name__ == "__main__":
    soft, hard, *words = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    os.execv(sys.executable, [sys.executable, "-m", *words])
