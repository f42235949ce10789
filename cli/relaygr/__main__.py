"""`python -m relaygr` is `relaygr`."""

from relaygr.cli.__main__ import main

if __name__ == "__main__":
    main()
