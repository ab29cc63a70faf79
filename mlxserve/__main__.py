"""`python -m mlxserve` is the command `mlxserve`."""

from mlxserve.cli import main

if __name__ == "__main__":
    main()
