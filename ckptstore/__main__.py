"""`python -m ckptstore` is the command `ckptstore`, for where its script is not on the path."""

from ckptstore.cli import main

if __name__ == "__main__":
    main()
